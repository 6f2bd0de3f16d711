#!/usr/bin/env bash
# Installs PyTorch, transformers and PEFT into a virtual environment for `pipeline.py` and `families.py`, and with --systems
# also torchtitan, Megatron Core and DeepSpeed for `emitted_plans.py`. Run on request, never by CI.
#
#   bench/peer/setup.sh [--systems]
#
# PIPEWRIGHT_PEER_VENV    the environment's folder (default: bench/.venv)
# PIPEWRIGHT_PEER_PYTHON  the Python to make it with, 3.11 or later (default: python3)
#
# A second run finds the environment ready and changes nothing. pip reads its own configuration, so an index
# that offers CPU-only wheels of this PyTorch version can be chosen there; the CUDA libraries are then not needed.

set -euo pipefail

TORCH_VERSION=2.15.0
TRANSFORMERS_VERSION=5.23.0
PEFT_VERSION=0.21.2
WHAT="PyTorch $TORCH_VERSION with transformers $TRANSFORMERS_VERSION and PEFT $PEFT_VERSION"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${PIPEWRIGHT_PEER_VENV:-$here/../.venv}
base_python=${PIPEWRIGHT_PEER_PYTHON:-python3}

# The packages that `import torch` needs besides its own wheel.
PURE=(
    filelock==4.2.11 fsspec==2026.9.0 jinja2==3.1.6 markupsafe==3.0.4 mpmath==1.3.0 networkx==3.6.1
    numpy==2.4.6 setuptools==84.2.1 sympy==1.14.0 typing-extensions==4.16.0
)

# The general Linux wheel is linked against these, so the loader wants them even where no GPU is used.
# What is only wanted for work on a GPU (Triton, the compiler headers, the Python bindings) is left out.
CUDA_LIBRARIES=(
    nvidia-cublas==13.4.1.3 nvidia-cuda-cupti==13.2.86 nvidia-cuda-nvrtc==13.2.86
    nvidia-cuda-runtime==13.2.86 nvidia-cudnn-cu13==9.26.0.51 nvidia-cufft==12.2.0.57
    nvidia-cufile==1.17.1.22 nvidia-cusparse==12.7.10.12 nvidia-cusparselt-cu13==0.8.1
    nvidia-nccl-cu13==2.30.7 nvidia-nvjitlink==13.5.37 nvidia-nvshmem-cu13==3.7.2
)

# The packages that `import transformers` needs besides its own wheel and those above.
TRANSFORMERS_NEEDS=(
    anyio==4.16.0 h11==0.16.0 httpcore2==2.16.2 httpx2==2.16.2 huggingface_hub==2.4.0 idna==3.20 packaging==26.3
    pyyaml==6.0.3 regex==2026.11.15 safetensors==0.8.0 tokenizers==0.23.3 tqdm==4.70.1 truststore==0.10.5
)

# The packages that `import peft` needs besides its own wheel and those above.
PEFT_NEEDS=(accelerate==1.15.0 psutil==7.2.2)

# The systems that execute plans, and the packages that their parsers need besides those above. DeepSpeed's package is
# built here, without its kernels.
SYSTEMS=(torchtitan==0.3.0 megatron-core==0.16.1 deepspeed==0.19.8)
SYSTEMS_NEED=(
    annotated-types==0.8.0 docstring-parser==0.18.0 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2
    py-cpuinfo==9.0.0 pydantic==2.14.4 pydantic-core==2.50.5 spmd_types==0.2.3
    torch_checkpointing==0.1.1 torchdata==0.11.0 typeguard==4.6.1 typing-inspection==0.4.5 tyro==1.0.17
    datasets==4.7.0 dill==0.4.1 httpx==0.28.1 multiprocess==0.70.19 pandas==3.1.1 pillow==13.0.0 pyarrow==26.0.1
    requests==2.34.2 tensorboard==2.21.0 urllib3==2.8.0 certifi==2026.10.19.post1 charset-normalizer==3.5.3
    wheel==0.48.0 xxhash==4.1.0 aiohttp==3.14.5
)

main() {
    local with_systems=
    if [[ ${1-} == --systems ]]; then
        with_systems=yes
        shift
    fi
    if [[ $# -gt 0 ]]; then
        sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        [[ $1 == -h || $1 == --help ]] || die "takes --systems at most, got \`$*\`"
        exit 0
    fi
    if usable 2>/dev/null; then
        say "$WHAT is ready in $venv, nothing to do"
        [[ -z $with_systems ]] || install_systems
        exit 0
    fi
    make_environment
    install "PyTorch $TORCH_VERSION (about 0.5 GB)" "torch==$TORCH_VERSION" "${PURE[@]}"
    install "transformers $TRANSFORMERS_VERSION" "transformers==$TRANSFORMERS_VERSION" "${TRANSFORMERS_NEEDS[@]}"
    install "PEFT $PEFT_VERSION" "peft==$PEFT_VERSION" "${PEFT_NEEDS[@]}"
    if ! usable 2>/dev/null; then
        install "the CUDA libraries that this wheel is linked against (about 2 GB)" "${CUDA_LIBRARIES[@]}"
    fi
    usable || die "$WHAT was installed in $venv but cannot be used; see the message above"
    say "$WHAT is ready in $venv"
    [[ -z $with_systems ]] || install_systems
}

install_systems() {
    install "what the systems need" "${SYSTEMS_NEED[@]}"
    DS_BUILD_OPS=0 install "torchtitan, Megatron Core and DeepSpeed" --no-build-isolation "${SYSTEMS[@]}"
}

# Makes the environment, or takes over the one that an interrupted run has left.
make_environment() {
    command -v "$base_python" >/dev/null || die "no \`$base_python\` found; set PIPEWRIGHT_PEER_PYTHON"
    "$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$base_python" --version) is too old, 3.11 or later is needed; set PIPEWRIGHT_PEER_PYTHON"
    if [[ -d $venv && ! -e $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
        die "$venv exists and is no virtual environment; set PIPEWRIGHT_PEER_VENV to another folder"
    fi
    if [[ ! -x $venv/bin/pip ]]; then
        say "making a virtual environment in $venv"
        "$base_python" -m venv "$venv" || die "cannot make a virtual environment in $venv"
    fi
}

# install WHAT REQUIREMENT...: exactly these, without what they would draw in.
install() {
    say "installing $1"
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps "${@:2}" ||
        die "cannot install $1; pip's message stands above"
}

# Whether the comparisons can run: the right versions load, with pipelining, Gloo and both families.
usable() {
    [[ -x $venv/bin/python ]] && "$venv/bin/python" - "$TORCH_VERSION" "$TRANSFORMERS_VERSION" "$PEFT_VERSION" <<'PYTHON'
import sys

import peft
import torch
import torch.distributed
import transformers
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from transformers import NemotronHForCausalLM, Qwen3MoeForCausalLM

if torch.__version__.split("+")[0] != sys.argv[1]:
    sys.exit(f"found PyTorch {torch.__version__}, need {sys.argv[1]}")
if transformers.__version__ != sys.argv[2]:
    sys.exit(f"found transformers {transformers.__version__}, need {sys.argv[2]}")
if peft.__version__ != sys.argv[3]:
    sys.exit(f"found PEFT {peft.__version__}, need {sys.argv[3]}")
if not torch.distributed.is_gloo_available():
    sys.exit("this PyTorch was built without Gloo")
PYTHON
}

say() {
    echo "setup.sh: $*"
}

die() {
    echo "setup.sh: error: $*" >&2
    exit 1
}

main "$@"
