#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `pip install .` in a copy of the sources, without the CUDA kernels, and the example with what it installed.
#   tests/consumers/wheel.sh PYTHON
set -euo pipefail
python=$1
source=$(realpath "$(dirname "$0")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/source"
cp -r "$source"/{CMakeLists.txt,LICENSE,README.md,cmake,include,pyproject.toml,python,src} "$work/source"
# The compiler by the name, and the folder at the depth, that the build has: then ccache knows all of it.
export CC=cc CXX=c++ CCACHE_BASEDIR=$work/source CCACHE_NOHASHDIR=1
"$python" -m pip install --quiet --no-deps --no-build-isolation --target "$work/site" \
  -C cmake.define.QUANTFUSE_CUDA=OFF -C build-dir=build "$work/source" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
rm -rf "$work/source"

cd "$work"
export PYTHONPATH=$work/site
"$python" -c "import quantfuse; assert quantfuse.__file__.startswith('$work/site/'), quantfuse.__file__"
"$python" "$source/examples/python_linear.py"
