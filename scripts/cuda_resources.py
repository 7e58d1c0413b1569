#!/usr/bin/env python3
"""What the CUDA kernels are made of, read from the objects of a build: registers, spills, occupancy, and the width of their loads.

    scripts/cuda_resources.py --check  <folder of objects>    fails where an update kernel spills or isn't vectorised as designed
    scripts/cuda_resources.py --table  <folder of objects>    prints the table of docs/cuda_kernels.md

Needs cuobjdump (CUDA toolkit; Triton's wheel carries one as well) and c++filt. Exits with 77 where one is missing: a check that was
not made. For CTest (tests/cuda) and people; Python's own library is enough.
"""
import argparse
import collections
import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import sys

SKIPPED = 77
THREADS = 256  # kernels/cuda/place.h
ELEMENTS_PER_THREAD = 8  # of a tile
SIZES = {"float": 4, "double": 8, "zero::kernels::Half": 2, "zero::kernels::BFloat16": 2}
NAMES = {"float": "f32", "double": "f64", "zero::kernels::Half": "f16", "zero::kernels::BFloat16": "bf16"}
# How many update kernels there are: 60 of Adam for f32 arithmetic (3 gradients, 2 types of moments, 5 of parameters and masters, amsgrad
# or not), 45 of SGD (the same, no type of a state that isn't there), two of each in f64. A kernel that is lost is noticed.
EXPECTED = {"AdamBody": 62, "SgdBody": 47}

Kernel = collections.namedtuple("Kernel", "arch optimizer param grad state master extra")


def find_cuobjdump(given):
    places = [given, shutil.which("cuobjdump")]
    places += sorted(glob.glob("/usr/local/cuda*/bin/cuobjdump"))
    for root in filter(None, [os.environ.get("ZERO_TORCH_ROOT"), os.environ.get("CUDA_HOME")]):
        places += [os.path.join(root, "../triton/backends/nvidia/bin/cuobjdump"), os.path.join(root, "bin/cuobjdump")]
    return next((p for p in places if p and os.path.isfile(p) and os.access(p, os.X_OK)), None)


def output_of(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def demangle(names):
    """c++filt leaves the extension of the type's own alone; one call for all."""
    done = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines()))


def kernel_of(arch, name):
    """The update kernel that a demangled name is, or None."""
    match = re.search(r"cuda::(AdamBody|SgdBody)<zero::kernels::cuda::UpdateTypes<([^<>]*)>, (true|false)>", name)
    if not match:
        return None
    types = [t.strip() for t in match.group(2).split(",")]
    return Kernel(arch, match.group(1), *types[1:4], types[4] == "true", match.group(3) == "true")


def read_object(cuobjdump, path):
    """Of each kernel of an object: {(arch, mangled name): {"registers", "stack", counts of instructions}}."""
    found = collections.defaultdict(collections.Counter)
    arch = name = ""
    for line in output_of(cuobjdump, "-res-usage", path).splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            arch = match.group(1)
        elif match := re.search(r"Function (\S+?):", line):
            name = match.group(1)
        if (match := re.search(r"REG:(\d+) STACK:(\d+)", line)) and name:
            found[arch, name].update(registers=int(match.group(1)), stack=int(match.group(2)))
            name = ""
    arch = name = ""
    for line in output_of(cuobjdump, "-sass", path).splitlines():
        if match := re.search(r"arch = (sm_\w+)", line):
            arch = match.group(1)
        elif match := re.search(r"Function : (\S+)", line):
            name = match.group(1)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(LDG|STG|LDL|STL)(\.[\w.]+)?\s", line):
            wide = "128" if ".128" in (match.group(2) or "") else "all"
            found[arch, name][f"{match.group(1)}.{wide}"] += 1
    return found


def read_kernels(cuobjdump, folder):
    objects = sorted(glob.glob(os.path.join(folder, "**", "*.cu.o"), recursive=True))
    if not objects:
        sys.exit(f"no *.cu.o in {folder}: build the target zero_cuda first")
    found = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for one in pool.map(lambda path: read_object(cuobjdump, path), objects):
            found.update(one)
    names = demangle(sorted({name for _, name in found}))
    kernels = {}
    for (arch, name), facts in found.items():
        kernel = kernel_of(arch, names[name])
        if kernel:
            kernels[kernel] = facts
    return kernels


def streams(kernel):
    """Bytes per element of what is read, and of what is written."""
    adam = kernel.optimizer == "AdamBody"
    states = (3 if kernel.extra else 2) if adam else (1 if kernel.extra else 0)
    written = [SIZES[kernel.param]] + states * [SIZES[kernel.state]] + kernel.master * [4]
    return written + [SIZES[kernel.grad]], written


def blocks_designed(kernel):
    """blocks_for() of kernels/cuda/update_body.h: what the launch bounds ask for."""
    read = sum(streams(kernel)[0])
    five_streams = kernel.optimizer == "AdamBody" and (kernel.extra or kernel.master)
    return 4 if read <= 16 and not five_streams else 3 if read <= 18 else 2 if read <= 32 else 1


def blocks_by_registers(registers):
    """Registers are given to warps in units of 256; 65536 on a multiprocessor, on all architectures from sm_80 on."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(65536 // per_warp // (THREADS // 32), 8)


def wide_accesses(kernel):
    """How many 16-byte loads and stores there are at least: each stream of the widest type, once for all of a thread's eight elements (a
    tile of one segment) and once for a pack alone (a tile of several). The scalars of a segment are loaded like that as well."""
    read, written = streams(kernel)
    pack = 16 // max(read)
    packs = ELEMENTS_PER_THREAD // pack + 1
    loads, stores = (sum(packs for size in side if size * pack == 16) for side in (read, written))
    return loads + (7 if kernel.optimizer == "AdamBody" else 1), stores


def problems(kernels):
    for arch in sorted({k.arch for k in kernels}):
        for optimizer, expected in EXPECTED.items():
            count = sum(k.arch == arch and k.optimizer == optimizer for k in kernels)
            if count != expected:
                yield f"{arch}: {count} kernels of {optimizer}, {expected} expected"
    for kernel, facts in sorted(kernels.items()):
        name = f"{kernel.arch} {describe(kernel)}"
        if "registers" not in facts:
            yield f"{name}: no resource usage"
        local = facts["LDL.all"] + facts["STL.all"] + facts["LDL.128"] + facts["STL.128"]
        if local or facts["stack"]:
            yield f"{name}: {local} accesses of local memory, {facts['stack']} bytes of stack"
        if blocks_by_registers(facts["registers"]) < blocks_designed(kernel):
            yield f"{name}: {facts['registers']} registers, too many for {blocks_designed(kernel)} blocks"
        for kind, least in zip(("LDG.128", "STG.128"), wide_accesses(kernel)):
            if facts[kind] < least:
                yield f"{name}: {facts[kind]} instructions {kind}, at least {least} expected"


def describe(kernel, name=NAMES.get):
    adam = kernel.optimizer == "AdamBody"
    extra = (", amsgrad" if adam else ", momentum") if kernel.extra else ""
    state = f", state {name(kernel.state)}" if adam or kernel.extra else ""
    return (f"{'Adam' if adam else 'SGD'}, parameter {name(kernel.param)}, gradient {name(kernel.grad)}{state}"
            f"{', master' if kernel.master else ''}{extra}")


def table(kernels):
    """The two 16-bit types need the same within a few registers: one row, with the most of them."""
    archs = sorted({k.arch for k in kernels}, key=lambda a: int(re.sub(r"\D", "", a)))
    rows = collections.defaultdict(lambda: collections.defaultdict(int))
    examples = {}
    for kernel, facts in kernels.items():
        row = describe(kernel, lambda t: "16 bits" if SIZES[t] == 2 else NAMES[t])
        rows[row][kernel.arch] = max(rows[row][kernel.arch], facts["registers"])
        examples[row] = kernel
    print("| kernel | bytes per element | registers: " + " | ".join(archs) + " | blocks | KB asked for at a time |")
    print("|---|---|" + "---|" * len(archs) + "---|---|")
    for row in sorted(rows, key=lambda r: (examples[r].optimizer, examples[r].extra, examples[r].master, r)):
        read, written = streams(examples[row])
        blocks = min(blocks_by_registers(registers) for registers in rows[row].values())
        flight = blocks * THREADS * ELEMENTS_PER_THREAD * sum(read) // 1024
        print(f"| {row} | {sum(read) + sum(written)} | " + " | ".join(str(rows[row][a]) for a in archs) + f" | {blocks} | {flight} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where the build put the objects (kernels/cuda in the build folder)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail on what the design rules out")
    what.add_argument("--table", action="store_true", help="print the table of the documentation")
    parser.add_argument("--cuobjdump", help="the tool (default: looked for)")
    arguments = parser.parse_args()
    cuobjdump = find_cuobjdump(arguments.cuobjdump)
    if not cuobjdump or not shutil.which("c++filt"):
        print(f"skipped: no {'c++filt' if cuobjdump else 'cuobjdump'} found; the machine code was not looked at")
        return SKIPPED
    kernels = read_kernels(cuobjdump, arguments.folder)
    if arguments.table:
        table(kernels)
        return 0
    found = list(problems(kernels))
    for problem in found:
        print(problem)
    most = max(f["registers"] for f in kernels.values())
    print(f"{len(kernels)} update kernels of {len({k.arch for k in kernels})} architectures, at most {most} registers: "
          f"{len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
