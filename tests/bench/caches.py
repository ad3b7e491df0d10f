"""The first step of a job on 2 gloo ranks, from an empty cache folder and from the one that the first start filled.

    python -m tests.bench.caches --layers 4

Both starts run in this order in one run; the ratio is that of their seconds from `torch.compile` to the end of the
first backward pass, under inductor. `own` are the seconds of AutoSP's passes, which are not cached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def start(layers: int, cache: Path, folder: Path) -> dict[str, float]:
    """What rank 0 measured in one start of the job."""
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += ["-m", "tests.autosp.gloo_caches"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(layers), str(folder)], env=environment, check=True)
    return json.loads((folder / "rank0.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    with TemporaryDirectory() as path:
        cold, warm = (start(layers, Path(path, "cache"), Path(path, name)) for name in ("cold", "warm"))
    print("| layers | cold s | warm s | warm / cold | own s, warm | AOTAutograd's cache | inductor's cache |")
    print("|---:|---:|---:|---:|---:|---|---|")
    caches = f"{warm.get('autograd_cache_hit', 0)} hit | {warm.get('fxgraph_cache_hit', 0)} hits"
    ratio = warm["seconds"] / cold["seconds"]
    print(f"| {layers} | {cold['seconds']:.1f} | {warm['seconds']:.1f} | {ratio:.2f} | {warm['own']:.1f} | {caches} |")


if __name__ == "__main__":
    main()
