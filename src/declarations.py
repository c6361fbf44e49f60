"""Writes the C file that defines smoe_declarations (include/smoe.h): what the headers declare, as JSON.

usage: declarations.py OUT.c HEADER...

    {"enums": {NAME: {ENUMERATOR: value}},
     "structs": {NAME: [[field, kind, default]]},         the default of struct_size, the struct's size, is null
     "functions": {NAME: [kind of the result, kind of each parameter]}}

A kind is "pointer", "string" (a result that is const char *), "void", the name of an enum or that of a C type. What the
script does not understand is an error of the build.
"""

import json
import re
import sys

NUMBERS = ("size_t", "int", "int32_t", "int64_t", "uint32_t", "uint64_t", "float")


def enums_of(text):
    found = {}
    for body, name in re.findall(r"typedef enum \w+ \{(.*?)\} (\w+);", text, re.S):
        pairs = [part.split("=") for part in body.split(",")]
        found[name] = {key.strip(): int(value) for key, value in pairs}
    return found


def kind_of(declaration, enums, callbacks):
    """The kind of "const TYPE *name" or of the TYPE alone."""
    words = declaration.replace("const ", "").split()
    if "*" in declaration or words[0] in callbacks:
        return "pointer"
    if words[0] in enums or words[0] in NUMBERS:
        return words[0]
    sys.exit(f"declarations.py: the type of '{declaration}' is not known")


def value_of(word, enums):
    """A default, as an _INIT macro has it."""
    named = {key: value for members in enums.values() for key, value in members.items()} | {"NULL": 0}
    if word.startswith("sizeof("):
        return None
    if word in named:
        return named[word]
    return float(word[:-1]) if word.endswith("f") else int(word)


def structs_of(text, macros, enums):
    callbacks = re.findall(r"typedef void \(\*(\w+)\)", text)
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.S):
        fields = []
        for line in filter(None, (line.strip() for line in body.split(";"))):
            first, *others = line.split(",")
            kind = first.rsplit(None, 1)[0] + " "
            for declared in (first, *(kind + other.strip() for other in others)):
                fields.append((re.findall(r"\w+", declared)[-1], kind_of(declared, enums, callbacks)))
        defaults = [value_of(word.strip(), enums) for word in macros[name.upper() + "_INIT"].split(",")]
        if len(defaults) != len(fields):
            sys.exit(f"declarations.py: {name} has {len(fields)} fields, {name.upper()}_INIT has {len(defaults)} values")
        found[name] = [[field, kind, default] for (field, kind), default in zip(fields, defaults)]
    return found


def functions_of(text, enums):
    found = {}
    for result, name, parameters in re.findall(r"SMOE_API ([\w *]*?)(smoe_\w+)\(([^)]*)\);", text):
        result = result.strip()
        given = [] if parameters == "void" else [kind_of(word.strip(), enums, ()) for word in parameters.split(",")]
        special = {"const char *": "string", "void": "void"}
        found[name] = [special.get(result) or kind_of(result, enums, ()), *given]
    return found


def main(out, headers):
    text = "".join(open(path, encoding="utf-8").read() for path in headers)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S).replace("\\\n", " ")
    macros = dict(re.findall(r"#define (\w+_INIT)\s*\{(.*?)\}", text))
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    enums = enums_of(text)
    declared = {"enums": enums, "structs": structs_of(text, macros, enums), "functions": functions_of(text, enums)}
    codes = [str(ord(letter)) for letter in json.dumps(declared, separators=(",", ":"))] + ["0"]
    lines = ["    " + ", ".join(codes[i : i + 24]) + "," for i in range(0, len(codes), 24)]
    with open(out, "w", encoding="utf-8") as file:
        print("/* Made by src/declarations.py. */\n#include <smoe.h>\n", file=file)
        print("static const char text[] = {", *lines, "};\n", sep="\n", file=file)
        print("const char *smoe_declarations(void)\n{\n    return text;\n}", file=file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
