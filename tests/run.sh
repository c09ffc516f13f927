#!/bin/sh
# Run the tests that are not slow, in two lanes beside each other. Usage: tests/run.sh PYTHON
#
# A process in which the simulated accelerator is enabled has autograd threads for it from then on, and PyTorch refuses
# to run backward in a fork of such a process: its tests, and the lane of the CPU runtime, never share a process.
set -u
cd "$(dirname "$0")/.."
python=$1
export OMP_NUM_THREADS=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

quick() {
    # The profile draws the same examples every time: a change is judged by itself. `make test-full` draws new ones.
    "$python" -m pytest -q -m 'not slow' --hypothesis-profile=ci "$@"
}

{
    lane=0
    quick tests/emulator || lane=1
    quick tests/accelerator tests/benchmarks || lane=1
    quick tests/cli tests/codecs tests/tiers tests/zoo || lane=1
    quick tests/capture/test_fake.py || lane=1  # compares static bytes: nothing of other tests may be alive
    quick tests/plan tests/residency tests/simulate tests/core tests/estimate tests/report || lane=1
    exit $lane
} >"$log" 2>&1 &
beside=$!
trap 'pkill -P "$beside"; kill "$beside"; exit 130' INT TERM  # a lane in the background does not hear Ctrl-C

# Processes of their own: budgets and traces count all tensors that are alive, those of other tests among them.
status=0
quick tests/bitwise tests/capture tests/docs tests/test_purity.py --ignore=tests/capture/test_fake.py || status=1
quick tests/execute --ignore=tests/execute/tide --ignore=tests/execute/update || status=1
quick tests/execute/tide || status=1
quick tests/execute/update || status=1
quick tests/memory || status=1
quick tests --ignore=tests/bitwise --ignore=tests/capture --ignore=tests/docs --ignore=tests/test_purity.py \
    --ignore=tests/execute --ignore=tests/memory \
    --ignore=tests/emulator --ignore=tests/accelerator --ignore=tests/plan --ignore=tests/residency \
    --ignore=tests/simulate --ignore=tests/core --ignore=tests/estimate --ignore=tests/report --ignore=tests/benchmarks \
    --ignore=tests/cli --ignore=tests/codecs --ignore=tests/tiers --ignore=tests/zoo || status=1
wait "$beside" || status=1
cat "$log"
exit $status
