#!/usr/bin/env python3
"""Trains examples/gpt, and reads what it exports with Python's safetensors: PyTorch has to find the loss that C++ finds.

    python3 read_export.py FOLDER GPT [LAUNCHER...]

Five steps at some stage, a checkpoint and an export; one more step from the checkpoint, at another stage, whose loss is of the
weights that were exported. Needs torch and safetensors. The model is gpt_reference.py's.
"""
import json
import pathlib
import shutil
import subprocess
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import gpt_reference as reference

MODEL, STEPS = "tiny", 5


def run(arguments, launcher, gpt, **options):
    words = [*launcher, gpt, *arguments, "--quiet"]
    for name, value in options.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=120)


def main():
    folder, gpt, *launcher = sys.argv[1:]
    folder = pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = reference.pseudo_text(100_000)
    (folder / "text").write_bytes(text)
    torch.set_num_threads(1)
    for stage in (0, 1, 2, 3):
        save, export, measured = folder / f"save{stage}", folder / f"model{stage}.safetensors", folder / f"next{stage}.json"
        common = dict(text=folder / "text", model=MODEL, micro_batch=reference.ROWS, bucket_bytes=20000)
        run([], launcher, gpt, stage=stage, steps=STEPS, save=save, export=export, **common)
        run([], launcher, gpt, stage=3 - stage, steps=STEPS + 1, resume=save, json=measured, **common)
        weights = load_file(export)
        expected = reference.weights(MODEL)
        assert {k: tuple(v.shape) for k, v in weights.items()} == {k: tuple(v.shape) for k, v in expected.items()}, "names or shapes"
        assert all(v.dtype == torch.float32 for v in weights.values())
        with safe_open(export, "pt") as file:
            assert file.metadata() == {"format": "pt"}, file.metadata()
        # The checkpoint's own files open as well.
        shards = sorted(next(save.iterdir()).glob("*.safetensors"))
        assert shards and all(load_file(shard) for shard in shards)
        with torch.no_grad():
            loss = sum(reference.loss_of(MODEL, weights, *reference.windows(text, reference.MODELS[MODEL][3], STEPS, rank)).item()
                       for rank in range(reference.RANKS)) / reference.RANKS
        theirs = json.loads(measured.read_text())
        theirs = theirs["losses"][-1] if isinstance(theirs, dict) else theirs[-1]["losses"][-1]
        difference = abs(loss - theirs) / theirs
        print(f"stage {stage}: loss {loss:.6f} by PyTorch, {theirs:.6f} by C++, relative difference {difference:.1e}")
        assert difference < 1e-5


if __name__ == "__main__":
    main()
