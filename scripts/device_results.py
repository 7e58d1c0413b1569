#!/usr/bin/env python3
"""Puts what device_check.sh has run, and the figures that its phases have left, into one results.json."""
import argparse
import json
import pathlib
import sys

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=pathlib.Path, help="holds NAME.json of phases that leave one; results.json goes there")
parser.add_argument("--gpu", required=True)
parser.add_argument("--architecture", required=True)
parser.add_argument("--dry-run", type=int, required=True, help="1: nothing has touched a device")
arguments = parser.parse_args()

phases = []
for line in sys.stdin:  # name, result, seconds
    name, result, seconds = line.rstrip("\n").split("\t")
    phase = {"name": name, "result": result, "seconds": int(seconds)}
    figures = arguments.folder / f"{name}.json"
    if figures.is_file():
        phase["figures"] = json.loads(figures.read_text())
    phases.append(phase)
results = {
    "gpu": arguments.gpu,
    "architecture": arguments.architecture,
    "dry_run": bool(arguments.dry_run),
    "phases": phases,
}
(arguments.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
