#!/bin/sh
# A stand-in for nvcc: enough for candle's build scripts, nothing in what it makes.
case " $* " in
*" --version "*) printf 'nvcc: NVIDIA (R) Cuda compiler driver\nCopyright\nBuilt\nCuda compilation tools, release 13.4, V13.4.92\n'; exit ;;
*" --list-gpu-code "*) echo sm_80; exit ;;
esac
empty_ptx() { printf '.version 8.0\n.target sm_80\n.address_size 64\n' >"$1"; }
kind=object out= folder=. sources=
while [ $# -gt 0 ]; do
  case $1 in
  -o) out=$2; shift ;;
  --output-directory) folder=$2; shift ;;
  --ptx) kind=ptx ;;
  --lib) kind=archive ;;
  *.cu) sources="$sources $1" ;;
  esac
  shift
done
make() {
  case $kind in
  ptx) empty_ptx "$1" ;;
  archive) ar crs "$1" ;;
  object) echo | cc -c -x c - -o "$1" ;;
  esac
}
if [ -n "$out" ]; then
  make "$out"
else
  for source in $sources; do
    name=$(basename "$source" .cu)
    [ $kind = ptx ] && make "$folder/$name.ptx" || make "$folder/$name.o"
  done
fi
