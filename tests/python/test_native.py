"""smoe/native.py compared with include/smoe.h: layouts of structs by a C program, values of enumerators. Needs no
torch."""

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
HEADER = (ROOT / "include" / "smoe.h").read_text()

# The header's enums and the dictionaries that have their values. An enumerator's name ends in the upper-case key.
ENUMS = {
    "smoe_backend": native.BACKENDS,
    "smoe_kernels": native.KERNELS,
    "smoe_type": native.TYPES,
    "smoe_activation": native.ACTIVATIONS,
    "smoe_layout": native.LAYOUTS,
    "smoe_entry": native.ENTRIES,
    "smoe_score": native.SCORES,
    "smoe_rounding": native.ROUNDINGS,
}


def layout_of(program: str, folder: Path) -> dict[str, str]:
    """Runs a C program that prints lines "key value". Returns them as a dictionary."""
    source, binary = folder / "layout.c", folder / "layout"
    source.write_text(program)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-I", ROOT / "include", source, "-o", binary], check=True)
    lines = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()
    return dict(line.split() for line in lines)


def test_structs_have_the_headers_layout(tmp_path):
    expected, prints = {}, []
    for name, struct in native.STRUCTS.items():
        expected[name] = str(ctypes.sizeof(struct))
        prints.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            at = getattr(struct, field)
            key = f"{name}.{field}"
            expected[key] = f"{at.offset}/{at.size}"
            prints.append(
                f'printf("{key} %zu/%zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
            )
    program = "#include <smoe.h>\n#include <stdio.h>\nint main(void) {\n" + "\n".join(prints) + "\n}\n"
    assert layout_of(program, tmp_path) == expected


def test_every_field_of_the_header_is_there():
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    for name, struct in native.STRUCTS.items():
        body = re.search(r"typedef struct " + name + r" \{(.*?)\n\} ", plain, re.S).group(1)
        fields = [field for line in body.split(";") for field in re.findall(r"\*?(\w+)\s*(?=,|$)", line.strip())]
        assert fields == [field for field, _ in struct._fields_], name
    structs = set(re.findall(r"typedef struct (smoe_\w+) \{", plain))
    assert structs == set(native.STRUCTS)


def enumerators(name: str) -> dict[str, int]:
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    body = re.search(r"typedef enum " + name + r" \{(.*?)\}", plain, re.S).group(1)
    return {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}


@pytest.mark.parametrize("enum", ENUMS)
def test_enumerators_have_the_headers_values(enum):
    header, ours = enumerators(enum), ENUMS[enum]
    assert sorted(header.values()) == sorted(ours.values())
    for key, value in ours.items():
        matching = [name for name, number in header.items() if number == value]
        assert len(matching) == 1 and matching[0].endswith("_" + key.upper()), (key, matching)


def test_status_codes_have_the_headers_values():
    header = enumerators("smoe_status")
    ours = {name: value for name, value in vars(native).items() if name == "OK" or name.startswith("ERROR_")}
    for name, value in ours.items():
        matching = [key for key, number in header.items() if number == value]
        assert len(matching) == 1 and matching[0].endswith("_" + name), (name, matching)
    assert len(ours) == len(header)


KINDS = {  # the C types of fields and parameters, and what ctypes declares for them
    "size_t": ctypes.c_size_t, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float, "int": ctypes.c_int,
}  # fmt: skip


def kind_of(declaration: str):
    """What ctypes declares for "TYPE name" or "TYPE *name"."""
    if "*" in declaration or "(" in declaration or declaration.startswith("smoe_stage_callback"):
        return ctypes.c_void_p
    word = declaration.replace("const ", "").split()[0]
    return ctypes.c_int if word in ENUMS else KINDS[word]


def test_fields_have_the_headers_types():
    """Not only the size: a float in place of an int32_t would go unnoticed otherwise."""
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    for name, struct in native.STRUCTS.items():
        body = re.search(r"typedef struct " + name + r" \{(.*?)\n\} ", plain, re.S).group(1)
        found = []
        for line in filter(None, (line.strip() for line in body.split(";"))):
            declared = line.split(",")
            word = declared[0].replace("const ", "").split()[0]
            found += [kind_of(declared[0])] + [kind_of(f"{word} {more.strip()}") for more in declared[1:]]
        assert found == [kind for _, kind in struct._fields_], name


def test_functions_have_the_headers_parameters():
    text = "".join(path.read_text() for path in (ROOT / "include").glob("*.h"))  # another test may have declared smoe.ep's
    plain = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    header = dict(re.findall(r"SMOE_API [\w *]*?(smoe_\w+)\(([^)]*)\);", plain))
    declared = {name: function for name, function in vars(native.library).items() if name.startswith("smoe_")}
    assert {"smoe_layer_forward", "smoe_update_selection_bias", "smoe_version"} <= set(declared)
    for name, function in declared.items():
        parameters = [word.strip() for word in header[name].split(",") if word.strip() != "void"]
        kinds = [ctypes.c_int if word.startswith("smoe_status ") else kind_of(word) for word in parameters]
        assert kinds == list(function.argtypes), name


def test_limits_are_the_librarys():
    checks = pytest.importorskip("smoe._checks")
    from smoe import _layout, _ops

    source = (ROOT / "src" / "problem.h").read_text()
    limit = {key: int(value) for key, value in re.findall(r"SMOE_(\w+) = (\d+)", source)}
    ours = dict(MAX_EXPERTS=checks.MAX_EXPERTS, MAX_TOPK=checks.MAX_TOPK, MAX_CHUNKS=checks.MAX_CHUNKS, MAX_TILE=checks.MAX_TILE)
    ours |= dict(MAX_THREADS=native.MOST_THREADS, TENSOR_ALIGN=_ops._ALIGN, BUFFER_ALIGN=_ops._BUFFER_ALIGN)
    ours |= dict(BLOCK_ROWS=_layout._ROW_BLOCK, PART_ALIGN=_layout._ALIGN)
    assert ours == limit


def test_version_is_cmakes():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert native.version() == re.search(r"project\(smoe VERSION ([\d.]+)", cmake).group(1)


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


def test_a_machine_with_many_processors(monkeypatch):
    asked = []
    create = lambda context, options: asked.append(options._obj.threads) or native.OK
    monkeypatch.setattr(native, "library", SimpleNamespace(smoe_create=create))
    for threads in (2, 768):
        native.create_context("cpu", threads=threads)
    assert asked == [2, 512]


def test_status_becomes_the_fitting_exception():
    assert isinstance(native.error(native.ERROR_SHAPE, "a shape"), ValueError)
    assert isinstance(native.error(native.ERROR_UNSUPPORTED, ""), NotImplementedError)
    assert isinstance(native.error(native.ERROR_DEVICE, ""), RuntimeError)
    assert str(native.error(native.ERROR_MEMORY, "")) != ""
    with pytest.raises((RuntimeError, NotImplementedError), match="smoe_create"):
        native.create_context("cuda", device=10**6)
