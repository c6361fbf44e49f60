"""examples/ep_all_to_all.py: smoe.experts_rows under torch's own all_to_all, started as users do."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples/ep_all_to_all.py"


def test_every_rank_equals_one_process():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0 and done.stdout.count("largest relative difference") == 4, done.stdout + done.stderr
