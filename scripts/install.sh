#!/bin/sh
# install.sh PYTHON VENV: make the virtual environment with everything in it, and say in one line what failed.
set -u
python=$1 venv=$2
log=$venv/install.log

fail() {
    echo "error: $1" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Python 3.11 or newer is needed; '$python' is not one. Try: make PYTHON=python3.11 ..."
"$python" -m venv "$venv" >/dev/null 2>&1 ||
    fail "cannot make $venv with $python: on Debian, apt-get install python3-venv; else look at 'df -h .'"

echo "installing NeMo, Megatron-Core and torch into $venv: 2 to 7 minutes, 3 GB (7 GB with CUDA)"
"$venv/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[nemo,dev]' \
    >"$log" 2>&1 &
pip=$!
trap 'kill $pip 2>/dev/null; exit 130' INT TERM
seconds=0
while kill -0 $pip 2>/dev/null; do
    if [ -t 1 ] || [ $((seconds % 30)) -eq 29 ]; then
        step=$(grep -o '^\(Collecting\|Downloading\|Installing\) [^ ;<>=~]*' "$log" | tail -n 1 | cut -c1-50)
        line=$(printf '%d:%02d  %s  %s' $((seconds / 60)) $((seconds % 60)) "$(du -sh "$venv" 2>/dev/null | cut -f1)" "$step")
        if [ -t 1 ]; then printf '\r  %-76s' "$line"; else echo "  $line"; fi
    fi
    sleep 1
    seconds=$((seconds + 1))
done
if [ -t 1 ]; then printf '\r%-80s\r' ''; fi
wait $pip || fail "pip could not install: $(sed -n 's/^ERROR: //p' "$log" | head -n 1 | cut -c1-300) (whole log: $log)"
# Transformer Engine's Python, without its compiled part and beside the environment's packages: the proof builds models
# with its layers, and nothing else may import it. The version is that of superpod/rehearsal/te/source.py.
te=$venv/share/superpod/te-2.9.0
rm -rf "$te"
"$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --target "$te" transformer_engine==2.9.0 \
    >>"$log" 2>&1 || fail "pip could not fetch Transformer Engine's Python: see the end of $log"
"$venv/bin/python" -m pip check >>"$log" 2>&1 || fail "the installed versions do not fit together (see the end of $log)"
touch "$venv/.installed"
echo "installed in $seconds s: $("$venv/bin/python" -m pip list --format=freeze 2>/dev/null | wc -l) packages"
