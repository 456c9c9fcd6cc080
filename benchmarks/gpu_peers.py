"""Starts vLLM once for every shape and keeps it, so that several benchmarks can be run beside it without waiting each time.

    python benchmarks/gpu_peers.py SITE build/peers 7B 1.5B 0.5B &        # SITE: a folder with vLLM in it
    python benchmarks/gpu_decode.py --vllm-at build/peers

All of them hold their memory on the GPU meanwhile; they compute only when asked.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_common import SHAPES, Vllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    args = parser.parse_args()
    peers = {name: Vllm.start(args.site, name, args.folder) for name in args.shapes}
    for name, peer in peers.items():
        print(name, peer.wait(1200), flush=True)
        peer.hang_up()
    while all(peer.is_alive for peer in peers.values()):
        time.sleep(1)


if __name__ == "__main__":
    main()
