#!/usr/bin/env bash
# Build DyNet 2.1.2 from its source package into a virtual environment of its own.
#
#   benchmarks/peers/build_dynet.sh VENV [EIGEN]
#
# VENV   made if it is missing; `benchmarks.peers.main --dynet-python VENV/bin/python` then uses it
# EIGEN  folder of Eigen's headers, /usr/include/eigen3 unless given (Debian: libeigen3-dev)
#
# Needs cmake, make, a C++ compiler and PYTHON (python3 unless set). JOBS compilers run at a time, 1
# unless set; CMAKE_CXX_COMPILER_LAUNCHER may name a program in front of the compiler, such as nice.
# What has been compiled is kept in VENV/build, so a build that was stopped goes on when called again.
set -euo pipefail
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  sed -n '2,12p' "$0" >&2
  exit 2
fi
version=2.1.2
mkdir -p "$1"
venv=$(cd "$1" && pwd)
eigen=${2:-/usr/include/eigen3}
build=$venv/build
source=$build/dyNET-$version
if [ ! -f "$eigen/unsupported/Eigen/CXX11/Tensor" ]; then
  echo "build_dynet.sh: $eigen has no unsupported/Eigen/CXX11/Tensor; install Debian's" \
    "libeigen3-dev, or name the folder of Eigen's headers" >&2
  exit 2
fi
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# Its Python module is written for Cython 0.29 and numpy 1.
"$venv/bin/python" -m pip install -q "cython<3" "numpy<2" setuptools wheel
mkdir -p "$build"
if [ ! -d "$source" ]; then
  (cd "$build" && "$venv/bin/python" -m pip download -q --no-deps --no-binary :all: \
    --no-build-isolation "dynet==$version")
  tar -xzf "$build/dyNET-$version.tar.gz" -C "$build"
fi
cmake -S "$source" -B "$build/cmake" -DEIGEN3_INCLUDE_DIR="$eigen" \
  -DCMAKE_CXX_FLAGS="-w ${CXXFLAGS:-}" >"$build/cmake.log"
make -C "$build/cmake" -j "${JOBS:-1}" dynet >>"$build/cmake.log"

places=$("$venv/bin/python" -c 'if True:
    import sysconfig, numpy
    paths = sysconfig.get_paths()
    print(paths["include"], paths["platlib"], numpy.get_include(),
          sysconfig.get_config_var("EXT_SUFFIX"), sep="\n")')
{ read -r include; read -r site; read -r numpy; read -r suffix; } <<<"$places"
cp "$build/cmake/dynet/libdynet.so" "$site/"
if [ ! -f "$build/_dynet.cpp" ]; then
  "$venv/bin/cython" --cplus -2 -o "$build/_dynet.cpp" "$source/python/_dynet.pyx"
fi
${CMAKE_CXX_COMPILER_LAUNCHER:-} "${CXX:-g++}" -O2 -std=c++11 -fPIC -shared -w -I"$source" -I"$eigen" -I"$include" -I"$numpy" \
  "$build/_dynet.cpp" -o "$site/_dynet$suffix" -L"$site" -ldynet "-Wl,-rpath,$site"
cp "$source/python/dynet_config.py" "$source/python/dynet_viz.py" "$site/"
sed -e 's/\${HAVE_CUDA}/False/' -e "s/\${GIT_DESCRIBE}/v$version/" \
  "$source/python/dynet.py.in" >"$site/dynet.py"
"$venv/bin/python" -c 'if True:
    import dynet
    x = dynet.ParameterCollection().add_parameters((2, 3))
    dynet.renew_cg()
    print("DyNet", dynet.__version__, "works:", dynet.sum_elems(x * dynet.ones((3, 1))).value())'
