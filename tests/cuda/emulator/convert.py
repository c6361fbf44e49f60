#!/usr/bin/env python3
"""Converts a source of src/cuda to C++ for the emulator: convert.py FROM TO."""
import re
import sys


def end_of(text, at, opening, closing):
    """The position after the bracket that closes the one at `at`."""
    depth = 0
    while True:
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


def arguments(text):
    """The text split at the commas that are not in parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def launch(text):
    """The text with its first kernel<<<grid, cta, bytes, stream>>>(arguments) replaced by a call of
    emulator::launch."""
    middle = start = text.index("<<<")
    while text[start - 1].isspace():
        start -= 1
    if text[start - 1] == ">":  # template arguments
        depth = 0
        while True:
            start -= 1
            depth += {">": 1, "<": -1}.get(text[start], 0)
            if depth == 0:
                break
    if text[start - 1] == "]":
        start = text.rindex("[", 0, start)
    while re.match(r"[\w:.]", text[start - 1]):
        start -= 1
    close = text.index(">>>", middle)
    opening = text.index("(", close)
    end = end_of(text, opening, "(", ")")
    grid, cta, shared, stream = arguments(text[middle + 3 : close])
    call = f"emulator::launch(dim3({grid}), dim3({cta}), {shared}, {stream}, false, {text[start:middle]}, {text[opening + 1 : end]}"
    return text[:start] + call + text[end:]


with open(sys.argv[1], encoding="utf-8") as source:
    text = source.read()
text = re.sub(r'asm\("tanh\.approx\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\(([^;]*)\)\);', r"\1 = tanhf(\2);", text)
text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1 *const \2 = (\1 *)emulator::shared;", text)
while "<<<" in text:
    text = launch(text)
if re.search(r"\basm\b", re.sub(r"//.*", "", text)):
    sys.exit(f"{sys.argv[1]}: an instruction the emulator does not know")
with open(sys.argv[2], "w", encoding="utf-8") as result:
    result.write(text)
