#!/usr/bin/env bash
# Trains on two unlike machines: the second one has 35% of a core, and the link between them 100 Mbit/s and 5 ms. It measures
# their profile, plans with it, and compares the planned step with the even cut, with the prediction and with the proved bound. A
# larger microbatch takes less time for each row, so the machines are measured again with the microbatches of the plan, and the even
# cut has them too.
#
#   bench/unlike/run.sh [PIPEWRIGHT]     (default: target/release/pipewright, built with --features mpi)
#
# The machines are network namespaces with a core each, so it needs root with real-time priorities, `/dev/net/tun`, iproute2,
# Python 3, Open MPI, and two cores without other work. It takes about three minutes. `mpirun` must not bind the processes to cores:
# each of the two machines would bind its process to the first one of the computer that both are on.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
binary=$(realpath "${1:-target/release/pipewright}")
steps=${STEPS:-30}
folder=$(mktemp -d)
fast=pwfast$$ slow=pwslow$$

clean() {
    jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true
    ip netns pids $slow 2>/dev/null | xargs --no-run-if-empty kill -KILL || true
    ip netns del $fast 2>/dev/null || true
    ip netns del $slow 2>/dev/null || true
    rm -rf "$folder"
}
trap clean EXIT

ip netns add $fast
ip netns add $slow
# One process with a higher priority takes 65% of the slow machine's core, in parts of two milliseconds, and is the cable, which
# delays each packet by 5 ms and lets 100 Mbit/s pass. A quota (`cpu.max`) is less even: a machine that has waited then runs at
# full speed, and measurements of its speed differed by a tenth. Queues of the kernel are no cable either: not every kernel has one
# with a delay (`netem`), and the timers of one with a rate (`tbf`) take time from the computations of both machines.
cat >"$folder/cable.py" <<'END'
import collections, ctypes, fcntl, os, select, struct, sys, time
PERIOD, BUSY, DELAY, RATE = 0.002, 0.0013, 0.005, 100e6 / 8
CLONE_NEWNET, TUNSETIFF, TUNSETOFFLOAD = 0x40000000, 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, TUN_F_CSUM, TUN_F_TSO4 = 0x0002, 0x1000, 0x4000, 1, 2
def end(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"cable", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    # As network cards do, it leaves checksums and small packets to the cable.
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return tap
ends = [end(namespace) for namespace in sys.argv[1:]]
other = dict(zip(ends, reversed(ends)))
free = dict.fromkeys(ends, 0.0)
waiting = {tap: collections.deque() for tap in ends}
begin = time.perf_counter()
while True:
    now = time.perf_counter()
    if now < begin + BUSY:
        for tap in select.select(ends, [], [], 0)[0]:
            packet = os.read(tap, 1 << 17)
            free[tap] = max(now, free[tap]) + len(packet) / RATE
            waiting[tap].append((free[tap] + DELAY, packet))
        for tap, queue in waiting.items():
            while queue and queue[0][0] <= now:
                try:
                    os.write(other[tap], queue.popleft()[1])
                except OSError:
                    pass  # The end is not up yet.
    else:
        begin = max(begin + PERIOD, now - PERIOD)
        time.sleep(max(0, begin - now))
END
chrt -f 50 taskset -c 1 python3 "$folder/cable.py" $fast $slow &
cable=$!
for end in "$fast 10.78.0.1" "$slow 10.78.0.2"; do
    read -r name address <<<"$end"
    until ip -n "$name" link show cable >/dev/null 2>&1; do
        kill -0 $cable || { echo "the cable between the machines did not start" >&2; exit 1; }
        sleep 0.05
    done
    ip -n "$name" addr add "$address/24" dev cable
    ip -n "$name" link set lo up
    ip -n "$name" link set cable mtu 9000 up
done

# `mpirun` reaches the slow machine with it. Its arguments are a host and a command.
cat >"$folder/shell" <<END
#!/bin/sh
shift
exec taskset -c 1 nsenter --net=/run/netns/$slow sh -c "\$*"
END
chmod +x "$folder/shell"

cat >"$folder/model.toml" <<'END'
[model]
vocab_size = 512
hidden_size = 512
intermediate_size = 1376
num_hidden_layers = 12
num_attention_heads = 8
[data]
seq_len = 128
[pipeline]
ranks = 2
microbatches = 16
transport = "mpi"
[run]
out = "out"
END
echo "steps = $steps" >>"$folder/model.toml"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# As `pipewright launch` sets them for several machines.
export OMPI_MCA_btl_tcp_eager_limit=16842752 OMPI_MCA_btl_tcp_rndv_eager_limit=16842752
on_both() {
    (cd "$folder" && taskset -c 0 nsenter --net=/run/netns/$fast mpirun -n 2 --bind-to none --host 10.78.0.1:1,10.78.0.2:1 --mca plm_rsh_agent "$folder/shell" \
        --mca btl tcp,self --mca btl_tcp_if_include 10.78.0.0/24 --mca oob_tcp_if_include 10.78.0.0/24 "$binary" "$@")
}

# The median milliseconds of the steps after the first five.
median() {
    python3 - "$1" <<'END'
import json, statistics, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line["step_ms"] for line in lines if "step_ms" in line][5:]
print(f"{statistics.median(steps):.1f}")
END
}

# Measures with the settings of the arguments, and plans with the result.
plan() {
    on_both profile model.toml "$@" --time-limit 20s --quiet -o profile.toml
    if ! grep -q '^\[\[rank\]\]' "$folder/profile.toml"; then
        echo "the machines were measured as equal: is something else running?" >&2
        exit 1
    fi
    (cd "$folder" && "$binary" plan model.toml "$@" --profile profile.toml --data-parallel 1 --format json -o planned.toml >plan.json)
}
# The microbatches of the best plan, as settings.
microbatches() {
    python3 - "$folder/plan.json" <<'END'
import json, sys
best = json.load(open(sys.argv[1]))["plans"][0]
print(f"--set pipeline.microbatches={best['microbatches']} --set pipeline.microbatch_size={best['microbatch_size']}")
END
}

plan
read -ra same <<<"$(microbatches)"
plan "${same[@]}"
read -ra same <<<"$(microbatches)"
sed -n '/^\[link\]/,/^\[\[layers\]\]/p' "$folder/profile.toml" | sed '$d'
on_both train model.toml "${same[@]}" --quiet --set run.out=even
on_both train planned.toml --quiet --set pipeline.transport=mpi --set run.out=planned
even=$(median "$folder/even/metrics.jsonl") planned=$(median "$folder/planned/metrics.jsonl")
python3 - "$folder/plan.json" "$even" "$planned" <<'END'
import json, sys
report, even, planned = json.load(open(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
best = report["plans"][0]
predicted, bound = best["predicted_step_s"] * 1e3, report["lower_bound_s"] * 1e3
print(f"plan: {best['name']}, boundaries {best['boundaries']}, {best['microbatches']} microbatches of {best['microbatch_size']}")
print(f"even cut: {even} ms, planned: {planned} ms: {even / planned:.2f} times as fast (1.4 wanted)")
print(f"predicted: {predicted:.1f} ms, {100 * (planned / predicted - 1):+.1f}% measured (5% wanted)")
print(f"proved bound: {bound:.1f} ms, the planned step is {predicted / bound:.3f} times as long (1.05 wanted)")
END
