#!/usr/bin/env bash
# Builds the command for a machine with a CUDA GPU, on a machine without one: no toolkit is needed, because the driver's
# libraries are loaded when the command starts. Burn's build downloads its copy of LLVM from GitHub.
#
#   bench/gpu/build.sh [FILE]     (default: bench/gpu/pipewright-cuda)
#
# The file runs on x86-64 with glibc 2.36 (Debian 12) or later if it is built there; it must not exceed 60 MB.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
file=${1:-bench/gpu/pipewright-cuda}
limit=$((60 * 1000 * 1000))

cargo build --release --locked --features cuda
strip -o "$file" target/release/pipewright

size=$(stat -c %s "$file")
((size <= limit)) || { echo "build.sh: error: $file has $size bytes, at most $limit are allowed" >&2; exit 1; }
echo "$file: $size bytes, needs glibc $(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)"
