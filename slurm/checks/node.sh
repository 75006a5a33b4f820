#!/usr/bin/env bash
# Check the health of one node: node.sh CHECK...; prints CHECK<TAB>ok|bad|skip<TAB>detail. Environment: GPUS (expected
# number), HCAS (comma-separated; empty = all), RUNS and FREE_GIB (disk). Changes nothing; needs no root.
set -uo pipefail

say() { printf '%s\t%s\t%s\n' "$1" "$2" "$3"; }
has() { command -v "$1" >/dev/null; }

gpus() {
    has nvidia-smi || { say gpus "$([[ $GPUS == 0 ]] && echo skip || echo bad)" "no nvidia-smi"; return; }
    local found errors
    found=$(nvidia-smi -L | wc -l)
    errors=$(nvidia-smi --query-gpu=index,ecc.errors.uncorrected.volatile.total,retired_pages.pending \
        --format=csv,noheader 2>/dev/null | awk -F', ' '$2 + 0 > 0 || $3 == "Yes" {printf "GPU %s has memory errors ", $1}')
    if ((found < GPUS)); then say gpus bad "$found of $GPUS GPUs respond"
    elif [[ $errors ]]; then say gpus bad "$errors"
    else say gpus ok "$found GPUs"; fi
    if has dcgmi; then
        if dcgmi diag -r 1 2>/dev/null | grep -q Fail; then say dcgm bad "dcgmi diag -r 1 fails"; else say dcgm ok "level 1"; fi
    fi
}

nvlink() {
    has nvidia-smi || { say nvlink skip "no nvidia-smi"; return; }
    local down
    down=$(nvidia-smi nvlink --status 2>/dev/null | grep -ci inactive)
    if ((down)); then say nvlink bad "$down NVLinks are inactive"; else say nvlink ok "all links active"; fi
}

infiniband() {
    local port name state rate bad=() good=0
    for port in /sys/class/infiniband/*/ports/1; do
        [[ -e $port/state ]] || continue
        name=${port#/sys/class/infiniband/}
        name=${name%%/*}
        [[ -z $HCAS || ",$HCAS," == *",$name,"* ]] || continue
        state=$(cut -d' ' -f2 <"$port/state")
        rate=$(cut -d' ' -f1 <"$port/rate")
        if [[ $state == ACTIVE ]]; then good=$((good + 1)); rates+=("$rate"); else bad+=("$name is $state"); fi
    done
    if ((${#bad[@]})); then say infiniband bad "${bad[*]}"
    elif ((good == 0)); then say infiniband skip "no InfiniBand port"
    elif [[ $(printf '%s\n' "${rates[@]}" | sort -u | wc -l) != 1 ]]; then say infiniband bad "rates differ: ${rates[*]} Gb/s"
    else say infiniband ok "$good ports at ${rates[0]} Gb/s"; fi
}

clocks() {
    has nvidia-smi || { say clocks skip "no nvidia-smi"; return; }
    local slowed
    slowed=$(nvidia-smi --query-gpu=index,clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.hw_thermal_slowdown \
        --format=csv,noheader 2>/dev/null | awk -F', ' '$2 == "Active" || $3 == "Active" {printf "GPU %s ", $1}')
    if [[ $slowed ]]; then say clocks bad "throttled by hardware: $slowed"; else say clocks ok "no throttling"; fi
}

disk() {
    local folder free
    for folder in /tmp /dev/shm "$RUNS"; do
        while [[ ! -e $folder && $folder != / ]]; do folder=$(dirname "$folder"); done
        free=$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1048576)}')
        if [[ $folder != /dev/shm ]] && ((free < FREE_GIB)); then say disk bad "$free GiB free in $folder, minimum $FREE_GIB"; return; fi
    done
    say disk ok "at least $FREE_GIB GiB free"
}

clock() { say clock ok "$(date +%s.%N)"; }

# A user's own check: a function prepended to this script (slurm/node_health.py), or a script next to this file (in a job).
own() {
    if declare -F "own_$1" >/dev/null; then "own_$1"
    elif [[ -f ${0%/*}/$1.sh ]]; then bash "${0%/*}/$1.sh"
    else say "$1" bad "no such check"; fi
}

rates=()
for check in "$@"; do
    case $check in
        gpus | nvlink | infiniband | clocks | disk) "$check" ;;
        time) clock ;;
        *) own "$check" ;;
    esac
done
