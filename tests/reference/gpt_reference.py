#!/usr/bin/env python3
"""Makes gpt_losses.json: what plain PyTorch computes for the model, weights, text and batches of examples/gpt.

    python3 gpt_reference.py gpt_losses.json [--check OTHER.json]

Needs torch. Each case is 20 AdamW steps of one process, one thread; a step is two micro-batches of four sequences with half the
loss each, in rank order: what two ranks with micro-batch 4 do. `spread` is what rounding does to these losses: the largest relative
change, per step, over three runs whose initial weights differ by a rounding error each (another processor or BLAS rounds
differently in every operation, and where the loss jumps, at step 12 of `small`, a last bit becomes a percent). --check compares the
licence corpus with another file of references that has sizes.<model>.accumulated_2x4.losses, and fails beyond tolerance().

Two texts: `pseudo`, made up from a hash here as in examples/gpt/text.cpp, the same on every machine; and `licences`, the files of
/usr/share/common-licenses one after the other, which differ between Debian releases (the sha256 says which these are).
The definitions of model, weights and batches are in docs/gpt.md; this file repeats them in Python on purpose.
"""
import argparse
import hashlib
import json
import pathlib
import struct

import torch
import torch.nn.functional as F

MASK = 2**64 - 1
STEPS, RANKS, ROWS = 20, 2, 4
MODELS = {"tiny": (2, 64, 2, 64), "small": (4, 256, 4, 128)}  # layers, width, heads, context


def hash64(key, counter):
    z = (key * 0xD1342543DE82EF95 + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def pseudo_text(length):
    drawn = 0

    def draw(below):
        nonlocal drawn
        drawn += 1
        return hash64(99, drawn - 1) % below

    def syllable():
        consonant = "bdfghklmnprstvwz"[draw(16)]
        return consonant + "aeiou"[draw(5)]

    words = ["".join(syllable() for _ in range(1 + draw(3))) for _ in range(200)]
    text = ""
    while len(text) < length:
        text += words[min(draw(200), draw(200))]
        text += ".\n" if draw(12) == 0 else " "
    return text[:length].encode()


def licences():
    folder = pathlib.Path("/usr/share/common-licenses")
    files = sorted(str(f) for f in folder.iterdir() if f.is_file() and not f.is_symlink())
    return b"".join(pathlib.Path(f).read_bytes() for f in files)


def weights(model):
    """Name, tensor: in the order of the weight file, whose position is the key of a tensor's hash."""
    layers, d, _, context = MODELS[model]
    shapes = {"wte": (256, d), "wpe": (context, d)}
    for i in range(layers):
        for name, shape in (("ln1_w", (d,)), ("ln1_b", (d,)), ("attn_qkv_w", (3 * d, d)), ("attn_qkv_b", (3 * d,)),
                            ("attn_proj_w", (d, d)), ("attn_proj_b", (d,)), ("ln2_w", (d,)), ("ln2_b", (d,)),
                            ("fc_w", (4 * d, d)), ("fc_b", (4 * d,)), ("proj_w", (d, 4 * d)), ("proj_b", (d,))):
            shapes[f"blocks.{i}.{name}"] = shape
    shapes |= {"lnf_w": (d,), "lnf_b": (d,), "head_w": (256, d)}
    out = {}
    for t, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 2:
            scale = (2**-7 if name.endswith("proj_w") else 2**-5) * 2**-23
            count = shape[0] * shape[1]
            value = torch.tensor([((hash64(1234 + t, n) >> 40) - 2**23) * scale for n in range(count)], dtype=torch.float32)
            out[name] = value.reshape(shape)
        else:
            out[name] = torch.ones(shape) if name.endswith("_w") else torch.zeros(shape)
    return out


def loss_of(model, p, tokens, targets):
    layers, d, heads, _ = MODELS[model]
    batch, time = tokens.shape
    x = p["wte"][tokens] + p["wpe"][:time]
    for i in range(layers):
        b = {name.split(".")[2]: value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        h = F.layer_norm(x, (d,), b["ln1_w"], b["ln1_b"])
        q, k, v = (part.view(batch, time, heads, d // heads).transpose(1, 2)
                   for part in F.linear(h, b["attn_qkv_w"], b["attn_qkv_b"]).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, d)
        x = x + F.linear(a, b["attn_proj_w"], b["attn_proj_b"])
        h = F.layer_norm(x, (d,), b["ln2_w"], b["ln2_b"])
        x = x + F.linear(F.gelu(F.linear(h, b["fc_w"], b["fc_b"])), b["proj_w"], b["proj_b"])
    x = F.layer_norm(x, (d,), p["lnf_w"], p["lnf_b"])
    return F.cross_entropy(F.linear(x, p["head_w"]).reshape(-1, 256), targets.reshape(-1))


def windows(text, context, step, rank):
    rows = []
    for row in range(ROWS):
        start = hash64(77, (step * RANKS + rank) * ROWS + row) % (len(text) - context)
        rows.append(list(text[start:start + context + 1]))
    both = torch.tensor(rows)
    return both[:, :-1], both[:, 1:]


def rounded_otherwise(value, generator):
    return value * (1 + (torch.rand(value.shape, generator=generator) * 2 - 1) * 2**-23)


def losses(model, text, initial, seed=0):
    """seed > 0: the weights differ from `initial` by rounding errors"""
    generator = torch.Generator().manual_seed(seed)
    p = {name: (rounded_otherwise(value, generator) if seed > 0 else value.clone()).requires_grad_()
         for name, value in initial.items()}
    optimizer = torch.optim.AdamW(p.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    out = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(RANKS):
            loss = loss_of(model, p, *windows(text, MODELS[model][3], step, rank))
            (loss / RANKS).backward()
            total += loss.item()
        optimizer.step()
        out.append(total / RANKS)
    return out


def relative(a, b):
    return [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]


def tolerance(spread):
    """gpt_losses.cpp has the same."""
    return [1e-5 + 10 * s for s in spread]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--check")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = {"pseudo": pseudo_text(100_000), "licences": licences()}
    result = {"made_by": "tests/reference/gpt_reference.py", "torch": torch.__version__.split("+")[0], "steps": STEPS, "ranks": RANKS, "micro_batch": ROWS,
              "texts": {name: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()} for name, text in texts.items()},
              "weights": {}, "cases": []}
    for model in MODELS:
        sha = hashlib.sha256()
        initial = weights(model)
        for value in initial.values():
            flat = value.flatten().tolist()
            sha.update(struct.pack(f"<{len(flat)}f", *flat))
        result["weights"][model] = sha.hexdigest()
        for name, text in texts.items():
            exact = losses(model, text, initial)
            others = [relative(losses(model, text, initial, seed), exact) for seed in (1, 2, 3)]
            spread = [float(f"{max(step):.2g}") for step in zip(*others)]
            result["cases"].append({"text": name, "model": model, "losses": exact, "spread": spread})
            print(f"{model} on {name}: loss {exact[-1]:.4f}, spread up to {max(spread):.1e}", flush=True)
    pathlib.Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    if args.check:
        other = json.loads(pathlib.Path(args.check).read_text())
        for case in (c for c in result["cases"] if c["text"] == "licences"):
            theirs = other["sizes"][case["model"]]["accumulated_2x4"]["losses"]
            differences = relative(case["losses"], theirs)
            print(f"{case['model']}: largest relative difference {max(differences):.2e}")
            assert all(d <= t for d, t in zip(differences, tolerance(case["spread"]), strict=True))


if __name__ == "__main__":
    main()
