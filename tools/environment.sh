# Sourced by the scripts beside it: `environment EXTRA ...` makes the virtual environment .venv-tools with secc and these extras
# installed from this checkout, and puts it first on PATH. Nothing is installed again while pyproject.toml stays the same.

environment() {
    local folder=.venv-tools sum extra missing=()
    # one thread for each process: a few busy ones on a small machine are many times slower
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
    unset PYTHONDONTWRITEBYTECODE # every rank is a process that imports secc: without bytecode each would compile it again
    sum=$(cksum < pyproject.toml)
    for extra in "$@"; do
        [ "$(cat "$folder/.installed-$extra" 2>/dev/null)" = "$sum" ] || missing+=("$extra")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        echo "installing secc[${missing[*]}] into $folder" >&2
        [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$(IFS=,; echo "${missing[*]}")]"
        for extra in "${missing[@]}"; do
            echo "$sum" > "$folder/.installed-$extra"
        done
    fi
    PATH="$PWD/$folder/bin:$PATH"
}
