"""smoe/native.py: what the library declares (src/declarations.py) compared with what a C compiler makes of the headers;
errors, loading. Needs no torch."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from smoe import native

ROOT = Path(__file__).parents[2]
HEADERS = [ROOT / "include" / name for name in ("smoe.h", "smoe_ep.h")]


def compiled(statements: list[str], folder: Path) -> dict[str, str]:
    """Runs these statements, which print lines "key value", in a C program. Returns the lines as a dictionary."""
    source, binary = folder / "program.c", folder / "program"
    # An enum is an int, or unsigned if no enumerator is negative.
    program = """#include <smoe_ep.h>
#include <stdio.h>
#define KIND(x) _Generic(x, float: "float", int32_t: "int32", uint32_t: "uint32", int64_t: "int64", uint64_t: "uint64", \\
                         default: "pointer")
#define FIELD(s, f) printf(#s "." #f " %zu/%zu/%s\\n", offsetof(s, f), sizeof((s *)0)->f, KIND(((s *)0)->f))
#define BYTES(name, value) \\
    for (size_t i = 0; i < sizeof value; i++) printf("%s%02x", i ? "" : name " ", ((unsigned char *)&value)[i]); \\
    puts("")
int main(void)
{
"""
    source.write_text(program + "\n".join(statements) + "\n}\n")
    subprocess.run([os.environ.get("CC", "cc"), "-I", ROOT / "include", source, "-o", binary], check=True)
    lines = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split() for line in lines)


C_KINDS = {
    ctypes.c_float: "float", ctypes.c_int32: "int32", ctypes.c_uint32: "uint32", ctypes.c_int64: "int64",
    ctypes.c_uint64: "uint64", ctypes.c_void_p: "pointer",
}  # fmt: skip


def test_structs_are_the_headers(tmp_path):
    """Offset, size and kind of every field, the struct's size, and the bytes that its _INIT macro gives."""
    expected, statements = {}, []
    for name, struct in native.STRUCTS.items():
        enums = {field for field, kind, _ in native._declared["structs"][name] if kind in native._declared["enums"]}
        for field, kind in struct._fields_:
            at = getattr(struct, field)
            expected[f"{name}.{field}"] = f"{at.offset}/{at.size}/{'uint32' if field in enums else C_KINDS[kind]}"
            statements.append(f"FIELD({name}, {field});")
        expected[name] = bytes(struct()).hex()
        # static, so that the padding is zero
        statements.append(f"static {name} {name}_ = {name.upper()}_INIT; BYTES(\"{name}\", {name}_);")
    assert compiled(statements, tmp_path) == expected


def test_enumerators_are_the_headers(tmp_path):
    members = {name: value for enum in native._declared["enums"].values() for name, value in enum.items()}
    found = compiled([f'printf("{name} %d\\n", {name});' for name in members], tmp_path)
    assert found == {name: str(value) for name, value in members.items()}
    assert native.SCORES == {"softmax_topk": 0, "topk_softmax": 1, "sigmoid": 2}  # by names without their prefix


def test_nothing_of_the_headers_is_left_out():
    """Every word smoe_... and SMOE_... that is followed by what a declaration has."""
    text = re.sub(r"/\*.*?\*/", "", "".join(path.read_text() for path in HEADERS), flags=re.S)
    declared = native._declared
    assert set(re.findall(r"\benum (\w+)", text)) == set(declared["enums"])
    assert set(re.findall(r"\bstruct (\w+) \{", text)) == set(declared["structs"])
    assert set(re.findall(r"\b(smoe_\w+)\(", text)) == set(declared["functions"])
    assert len(re.findall(r"\bSMOE_\w+ = ", text)) == sum(map(len, declared["enums"].values()))


def test_functions_have_the_headers_parameters():
    text = re.sub(r"/\*.*?\*/", "", "".join(path.read_text() for path in HEADERS), flags=re.S)
    for name, (_, *kinds) in native._declared["functions"].items():
        parameters = [word.split() for word in re.search(rf"{name}\(([^)]*)\)", text).group(1).split(",")]
        found = ["pointer" if "*" in "".join(words) else words[0] for words in parameters if words != ["void"]]
        assert found == kinds, name
        assert getattr(native.library, name).argtypes == [native._KINDS[kind] for kind in kinds]


@pytest.mark.parametrize(
    "old, new",
    [
        ("int32_t chunks;", "double chunks;"),
        ("SMOE_SCORE_SIGMOID = 2", "SMOE_SCORE_SIGMOID = OTHER"),
        ("    int32_t tile;", "    int32_t tile, more;"),
    ],
)
def test_what_the_script_does_not_know_ends_the_build(old, new, tmp_path):
    """A type, a value, and a field without a default."""
    header = HEADERS[0].read_text()
    assert old in header
    (tmp_path / "smoe.h").write_text(header.replace(old, new))
    script = [sys.executable, ROOT / "src" / "declarations.py", tmp_path / "out.c"]
    assert subprocess.run([*script, HEADERS[0]]).returncode == 0
    (tmp_path / "out.c").unlink()
    done = subprocess.run([*script, tmp_path / "smoe.h"], capture_output=True)
    assert done.returncode != 0 and not (tmp_path / "out.c").exists()


def test_activations_have_the_librarys_gates():
    """The bytes that H takes for a token: twice as many with a gate."""
    context, rows = native.create_context("cpu", threads=1), {}
    for name, value in native.ACTIVATIONS.items():
        layer = native.Layer(tokens=64, hidden=8, intermediate=8, experts=1, activation=value, entry=native.ENTRIES["from_rows"])
        rows[name] = native.query_sizes(context, layer).saved_token_bytes
    assert {name for name in rows if rows[name] == rows["swiglu"]} == set(native.GATED_ACTIVATIONS)
    assert {name for name in rows if rows[name] == rows["silu"] < rows["swiglu"]} == set(native.PLAIN_ACTIVATIONS)


def test_limits_are_the_librarys():
    checks = pytest.importorskip("smoe._checks")
    from smoe import _ops

    source = (ROOT / "src" / "problem.h").read_text()
    limit = {key: int(value) for key, value in re.findall(r"MOE_(\w+) = (\d+)", source)}
    ours = dict(MAX_EXPERTS=checks.MAX_EXPERTS, MAX_LORA_RANK=checks.MAX_LORA_RANK, MAX_THREADS=native.MOST_THREADS)
    ours |= dict(TENSOR_ALIGN=_ops._ALIGN, BUFFER_ALIGN=_ops._BUFFER_ALIGN)
    assert ours.items() <= limit.items()


def test_version_stands_in_the_header():
    """CMake and pip read it there."""
    cache = (Path(os.environ["SMOE_BUILD"]) / "CMakeCache.txt").read_text()
    assert native.version() == re.search(r"CMAKE_PROJECT_VERSION:STATIC=(.*)", cache).group(1)
    pip = (ROOT / "pyproject.toml").read_text()
    regex = re.search(r"metadata.version\][^[]*?regex = '(.*)'", pip).group(1)
    assert native.version() == ".".join(re.search(regex, HEADERS[0].read_text()).group("major", "minor", "patch"))


def test_import_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import smoe; assert smoe.__version__ and smoe.build_info()['version'] == smoe.__version__\n"
        "assert smoe.native.Layer().tokens == 0\n"
        "try: smoe.experts\n"
        "except ImportError: print('no torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert (done.stdout, done.returncode) == ("no torch\n", 0), done.stderr


def test_import_beyond_torch_takes_little_time():
    """The least CPU time of three processes. The limit is 0.2 s. torch._dynamo alone, which a decorator may import, takes 2 s."""
    pytest.importorskip("torch")
    program = (
        "import sys, time, torch; start = time.process_time()\n"
        "import smoe, smoe.compat; smoe.moe, smoe.MoE\n"
        "print(time.process_time() - start)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    run = lambda: subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    done = [run() for _ in range(3)]
    assert all(process.returncode == 0 for process in done), done[0].stderr
    assert min(float(process.stdout) for process in done) < 0.2


@pytest.mark.parametrize("missing", ["/nowhere/libsmoe.so", "libc.so.6"])
def test_a_library_that_does_not_load_is_named(missing):
    """SMOE_LIBRARY names a file that does not exist, or another library."""
    done = subprocess.run(
        [sys.executable, "-c", "import smoe"], capture_output=True, text=True,
        env=dict(os.environ, SMOE_LIBRARY=missing),
    )  # fmt: skip
    assert done.returncode != 0 and f"ImportError: smoe: the C library {missing} does not load" in done.stderr


def test_a_context_has_at_most_512_threads(monkeypatch):
    asked = []
    create = lambda context, options: asked.append(options._obj.threads) or 0
    monkeypatch.setattr(native, "library", SimpleNamespace(smoe_create=create))
    for threads in (2, 768):
        native.create_context("cpu", threads=threads)
    assert asked == [2, 512]


def test_status_becomes_the_fitting_exception():
    assert isinstance(native.error(native.STATUSES["error_shape"], "a shape"), ValueError)
    assert isinstance(native.error(native.STATUSES["error_unsupported"], ""), NotImplementedError)
    assert isinstance(native.error(native.STATUSES["error_device"], ""), RuntimeError)
    assert str(native.error(native.STATUSES["error_memory"], "")) != ""
    with pytest.raises((RuntimeError, NotImplementedError), match="smoe_create"):
        native.create_context("cuda", device=10**6)
