# Sourced by the scripts beside it: `environment NAME EXTRAS` makes the virtual environment NAME with secc and EXTRAS
# installed from this checkout, and puts it first on PATH. Nothing is installed again while pyproject.toml stays the same.

environment() {
    local folder=$1 extras=$2 wanted
    # one thread for each process: a few busy ones on a small machine are many times slower
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    wanted="$extras $(cksum < pyproject.toml)"
    if [ "$(cat "$folder/.installed" 2>/dev/null)" != "$wanted" ]; then
        echo "installing secc[$extras] into $folder" >&2
        [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
        echo "$wanted" > "$folder/.installed"
    fi
    PATH="$PWD/$folder/bin:$PATH"
}
