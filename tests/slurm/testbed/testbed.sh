#!/usr/bin/env bash
# A real Slurm with several nodes on one machine: slurmctld, slurmdbd on MariaDB, munge, and a slurmd per node in its own
# network, host-name, process and /dev/shm namespaces. The file system is shared, the GPUs are declared. Needs root.
#
#   testbed.sh install | up | down | status | env
#   testbed.sh crash I | boot I          a node loses power / comes back
#   testbed.sh cut I | join I            its network cable
#   testbed.sh hang I | unhang I         its processes stop answering, the cable still carries
#   testbed.sh slow I RATE | fast I      its cable, by tc: slow 2 2mbit
#   testbed.sh slurmd-kill I             kill -9 of slurmd alone; `boot I` starts it again
#   testbed.sh ctld-stop | ctld-start | dbd-stop | dbd-start
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
BASE=${TESTBED:-/tmp/superpod-testbed}
NODES=${TESTBED_NODES:-4}
GPUS=8
PORT=${TESTBED_PORT:-27000}
NET=${TESTBED_NET:-10.77.0}
NAME=${TESTBED_NAME:-s} # of the bridge and the namespaces: another one for a second testbed beside the first
BRIDGE=${NAME}br0
HOST=$(hostname -s)
export SLURM_CONF=$BASE/etc/slurm.conf DEBIAN_FRONTEND=noninteractive

die() { echo "testbed: $*" >&2; exit 1; }

# The daemons outlive this script, and would hold whatever its caller has open, such as the lock of `flock FILE testbed.sh up`.
for fd in "/proc/$$/fd"/*; do
    fd=${fd##*/}
    [[ $fd -le 2 || $fd == 255 ]] || exec {fd}>&- # 255 is bash's own, of this script
done

packages() {
    local c missing=
    for c in slurmctld slurmd munged slurmdbd mariadbd mariadb ip unshare tc shellcheck sshd ssh gcc; do
        command -v "$c" >/dev/null || missing=1
    done
    [[ -e /usr/include/slurm/spank.h ]] || missing=1
    [[ $missing ]] || return 0
    # Debian's maintainer scripts would start daemons of their own.
    [[ -e /usr/sbin/policy-rc.d ]] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; }
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core \
        mariadb-client-core iproute2 procps hostname util-linux shellcheck openssh-server openssh-client \
        gcc libc6-dev libslurm-dev >/dev/null
}

configure() {
    local i
    mkdir -p "$BASE"/{etc,log,run,state,dev,munge,db,runs,small}
    # A disk to fill: nodes see what is mounted before they boot.
    mountpoint -q "$BASE/small" || mount -t tmpfs -o size=40m none "$BASE/small"
    chmod 755 "$BASE"
    for i in $(seq 1 "$NODES"); do
        mkdir -p "$BASE/spool/node$i" "$BASE/shm/node$i"
    done
    { for i in $(seq 1 "$NODES"); do echo "$NET.$((10 + i)) node$i"; done && cat /etc/hosts; } >"$BASE/hosts"
    # slurmd takes no plain files as GPUs; clones of /dev/null will do.
    for i in $(seq 0 $((GPUS - 1))); do [[ -c $BASE/dev/gpu$i ]] || mknod -m 666 "$BASE/dev/gpu$i" c 1 3; done
    if [[ ! -s $BASE/munge/munge.key ]]; then
        dd if=/dev/urandom of="$BASE/munge/munge.key" bs=1024 count=1 status=none
        chmod 400 "$BASE/munge/munge.key"
    fi
    slurm_conf >"$BASE/etc/slurm.conf"
    echo "Name=gpu Type=h100 File=$BASE/dev/gpu[0-$((GPUS - 1))]" >"$BASE/etc/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$BASE/etc/cgroup.conf" # 22.05 has no "disabled", and looks for systemd otherwise
    gcc -O1 -shared -fPIC -o "$BASE/etc/fake_pyxis.so.new" "$HERE/fake_pyxis.c"
    mv "$BASE/etc/fake_pyxis.so.new" "$BASE/etc/fake_pyxis.so" # a step may have the old one loaded
    echo "required $BASE/etc/fake_pyxis.so" >"$BASE/etc/plugstack.conf"
    dbd_conf >"$BASE/etc/slurmdbd.conf"
    chmod 600 "$BASE/etc/slurmdbd.conf"
}

slurm_conf() {
    local i
    cat <<C
ClusterName=testbed
SlurmctldHost=$HOST($NET.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is the wait of a requeued job too: 120 s by default
AuthInfo=socket=$BASE/munge/munge.sock,cred_expire=10
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.pid
SlurmdPidFile=$BASE/run/slurmd-%n.pid
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0,kill_invalid_depend
SlurmctldTimeout=10
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MessageTimeout=10
BatchStartTimeout=20
CompleteWait=0
MinJobAge=600
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$NET.1
AccountingStoragePort=$((PORT + 1))
# with munge this is the socket of the way to slurmdbd
AccountingStoragePass=$BASE/munge/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations
C
    for i in $(seq 1 "$NODES"); do
        echo "NodeName=node$i NodeHostname=node$i NodeAddr=$NET.$((10 + i)) Port=$((PORT + 10 + i)) CPUs=16 Boards=1" \
            "SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:h100:$GPUS State=UNKNOWN"
    done
    cat <<C
PartitionName=batch Nodes=node[1-$NODES] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=node[1-$NODES] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
C
}

dbd_conf() {
    cat <<C
AuthType=auth/munge
AuthInfo=socket=$BASE/munge/munge.sock
DbdHost=$HOST
DbdAddr=$NET.1
DbdPort=$((PORT + 1))
SlurmUser=root
LogFile=$BASE/log/slurmdbd.log
PidFile=$BASE/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 2))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
C
}

until_true() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || die "timeout: $*"
        sleep 0.1
    done
}

# kill -0 says yes to a zombie too, and the first process of a container may not reap.
running() { [[ -e /proc/$1/stat ]] && ! grep -q ') Z ' "/proc/$1/stat" 2>/dev/null; }
alive() { [[ -s $1 ]] && running "$(cat "$1")"; }
stop() { # PIDFILE [SIGNAL]
    local pid
    [[ -s $1 ]] || return 0
    pid=$(cat "$1")
    kill "-${2:-TERM}" "$pid" 2>/dev/null || true
    for _ in $(seq 100); do running "$pid" || break; sleep 0.1; done
    rm -f "$1"
}
sql() { mariadb --no-defaults --socket="$BASE/db/mysql.sock" -uroot -e "$1"; }
ready() { (($(sinfo -h -N -p batch -t idle,alloc,mix -o %N | wc -l) >= NODES)); }

database() {
    if [[ ! -d $BASE/db/data/mysql ]]; then
        mariadb-install-db --no-defaults --datadir="$BASE/db/data" --auth-root-authentication-method=normal \
            --skip-test-db --user=root >"$BASE/log/mariadb-install.log" 2>&1
    fi
    if ! alive "$BASE/run/mariadbd.pid"; then
        setsid mariadbd --no-defaults --user=root --datadir="$BASE/db/data" --socket="$BASE/db/mysql.sock" \
            --pid-file="$BASE/run/mariadbd.pid" --bind-address=127.0.0.1 --port=$((PORT + 2)) --skip-log-bin \
            --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 --skip-name-resolve \
            >"$BASE/log/mariadbd.log" 2>&1 </dev/null &
        until_true 60 sql "select 1"
        sql "create database if not exists slurm_acct_db; create user if not exists slurm@'127.0.0.1' identified by
             'slurm'; grant all on slurm_acct_db.* to slurm@'127.0.0.1'"
    fi
}

dbd_start() {
    alive "$BASE/run/slurmdbd.pid" && return
    slurmdbd
    until_true 60 sacctmgr -n show cluster
}

ctld_start() { alive "$BASE/run/slurmctld.pid" || slurmctld; }

accounts() {
    sacctmgr -n show cluster format=cluster | grep -qw testbed || sacctmgr -i add cluster testbed >/dev/null
    if ! sacctmgr -n show account format=account | grep -qw acct; then
        sacctmgr -i add account acct Description=tests Organization=tests >/dev/null
        sacctmgr -i add user root Account=acct DefaultAccount=acct >/dev/null
    fi
}

boot() {
    local i=$1
    if [[ ! -e /run/netns/${NAME}node$i ]]; then
        ip netns add "${NAME}node$i"
        ip link add "${NAME}node-h$i" type veth peer name eth0 netns "${NAME}node$i"
        ip link set "${NAME}node-h$i" master "$BRIDGE" up
        ip -n "${NAME}node$i" addr add "$NET.$((10 + i))/24" dev eth0
        ip -n "${NAME}node$i" link set eth0 up
        ip -n "${NAME}node$i" link set lo up
    fi
    if alive "$BASE/run/node$i.pid"; then
        # shellcheck disable=SC2016
        inside "$i" sh -c 'pgrep -x slurmd >/dev/null || slurmd -N "$(hostname)"'
        return
    fi
    # shellcheck disable=SC2016
    setsid ip netns exec "${NAME}node$i" unshare --uts --ipc --pid --fork --kill-child --mount-proc bash -c '
        hostname "$1"; mount --bind "$2" /dev/shm; mount --bind "$3" /etc/hosts; slurmd -N "$1"; while :; do sleep 1 & wait -n; done' \
        node "node$i" "$BASE/shm/node$i" "$BASE/hosts" >"$BASE/log/node$i.out" 2>&1 </dev/null &
    echo $! >"$BASE/run/node$i.pid"
}

first_process() { pgrep -P "$(cat "$BASE/run/node$1.pid")" | head -n 1; }
inside() { # I COMMAND...: run it on a node
    local pid
    pid=$(first_process "$1")
    shift
    nsenter --target "$pid" --mount --uts --ipc --net --pid -- "$@"
}
signal_all() { # I SIGNAL: to every process of the node but its first
    # shellcheck disable=SC2016
    inside "$1" bash -c 'for p in /proc/[0-9]*; do p=${p#/proc/}; [[ $p == 1 || $p == $$ ]] || kill "-$1" "$p" 2>/dev/null; done; true' _ "$2"
}

cable() { [[ $1 ]] && echo eth0 || echo "${NAME}node-h$2"; } # its end on this side
# shellcheck disable=SC2086 # the side is a command's first words
limit() { $1 tc qdisc replace dev "$(cable "$1" "$2")" root tbf rate "$3" burst 32kbit latency 400ms; }
# shellcheck disable=SC2086
unlimit() { $1 tc qdisc del dev "$(cable "$1" "$2")" root; }

up() {
    ((EUID == 0)) || die "needs root"
    packages
    unshare --net true 2>/dev/null || die "this machine allows no network namespaces"
    configure
    ip link show "$BRIDGE" >/dev/null 2>&1 || ip link add "$BRIDGE" type bridge
    ip addr replace "$NET.1/24" dev "$BRIDGE"
    ip link set "$BRIDGE" up
    alive "$BASE/run/munged.pid" || munged --force --num-threads=4 --key-file="$BASE/munge/munge.key" \
        --socket="$BASE/munge/munge.sock" --pid-file="$BASE/run/munged.pid" --log-file="$BASE/log/munged.log" \
        --seed-file="$BASE/munge/seed"
    database
    dbd_start
    accounts
    ctld_start
    local i
    for i in $(seq 1 "$NODES"); do boot "$i"; done
    until_true 60 ready
}

down() {
    local i
    [[ ! -s $BASE/run/slurmctld.pid ]] || timeout 10 scancel -u root 2>/dev/null || true
    for i in $(seq 1 "$NODES"); do stop "$BASE/run/node$i.pid" KILL; done
    for i in slurmctld slurmdbd mariadbd munged; do stop "$BASE/run/$i.pid"; done
    for i in $(seq 1 "$NODES"); do ip netns del "${NAME}node$i" 2>/dev/null || true; done
    ip link del "$BRIDGE" 2>/dev/null || true
    umount "$BASE/small" 2>/dev/null || true
}

case ${1:-} in
    install) packages ;;
    up) up ;;
    down) down ;;
    status) sinfo -N -l && squeue ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    boot) boot "$2" ;;
    crash) kill -9 "$(cat "$BASE/run/node$2.pid")" ;;
    cut) ip link set "${NAME}node-h$2" down ;;
    join) ip link set "${NAME}node-h$2" up ;;
    hang) signal_all "$2" STOP ;;
    unhang) signal_all "$2" CONT ;;
    slow) for side in "" "ip netns exec ${NAME}node$2"; do limit "$side" "$2" "$3"; done ;;
    fast) for side in "" "ip netns exec ${NAME}node$2"; do unlimit "$side" "$2"; done ;;
    slurmd-kill) inside "$2" pkill -9 -x slurmd ;;
    inside) shift && inside "$@" ;;
    ctld-stop) stop "$BASE/run/slurmctld.pid" ;;
    ctld-start) ctld_start ;;
    dbd-stop) stop "$BASE/run/slurmdbd.pid" ;;
    dbd-start) dbd_start ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
