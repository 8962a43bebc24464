#!/usr/bin/env bash
# Run all tests but perf, in two groups side by side: unit tests compute while those of servers wait.
# What fails beside other tests gets a second run, alone, and has to pass there.
# Usage: scripts/tests.sh PYTHON UNIT_PROCESSES SERVER_PROCESSES
set -uo pipefail
python=$1 unit_processes=$2 server_processes=$3
# Each group keeps its own record of what failed.
unit=("$python" -m pytest tests/unit -o cache_dir=build/cache-unit)
servers=("$python" -m pytest tests/contract tests/end_to_end tests/fault -o cache_dir=build/cache-servers)
# In the order of tests/conftest.py: long files first. xdist would begin with the files that have most tests.
beside=(--dist loadfile --no-loadscope-reorder --durations=15)
alone=(--last-failed --last-failed-no-failures none --verbose)
mkdir -p build

# Servers have time limits: theirs is the processor when both groups want it. Each group has ports of its own.
PYTEST_FLAMBEAU_PORTS=12000-15999 nice -n 5 "${unit[@]}" "${beside[@]}" --numprocesses "$unit_processes" >build/unit-tests.txt 2>&1 &
unit_run=$!
trap 'kill "$unit_run" 2>/dev/null' EXIT
echo 'Unit tests run beside these; their output comes after them. Until then it is in build/unit-tests.txt.'
PYTEST_FLAMBEAU_PORTS=16000-28999 "${servers[@]}" "${beside[@]}" --numprocesses "$server_processes"
servers_failed=$?
wait "$unit_run"
unit_failed=$?
trap - EXIT
cat build/unit-tests.txt

again() { # what failed, one by one
	echo 'Once more, one by one: what failed. A test that passes now is unstable and needs mending.'
	"$@" "${alone[@]}"
}
[ "$servers_failed" = 0 ] || { again "${servers[@]}"; servers_failed=$?; }
[ "$unit_failed" = 0 ] || { again "${unit[@]}"; unit_failed=$?; }
exit $((servers_failed || unit_failed))
