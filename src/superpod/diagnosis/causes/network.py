"""Causes: communication between ranks: NCCL, Gloo, the rendezvous and the network."""

from __future__ import annotations

from superpod.diagnosis.causes.table import ECHO, ENDING, GROUND, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

_GONE = ("rank_killed", "rank_crashed", "hang", "nccl_timeout", "collective_mismatch", "cancelled", "time_limit")

CAUSES = (
    Cause(
        "nccl_timeout",
        ENDING,
        "ranks timed out in a collective that not all ranks reached",
        "read the log of the rank that did not reach the collective: `recipes logs RUN --rank R`; in the next run, set "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 to write flight-recorder dumps, which "
        "`recipes why` reads",
        (
            *phrases("collective operation timeout", "timed out in monitoredbarrier", sure=LIKELY),
            *phrases("some nccl operations have failed or timed out", "failed to pass monitoredbarrier", sure=LIKELY),
            *phrases("received a dump signal due to a collective timeout", "operation timed out!", sure=LIKELY),
            Pattern("timed out waiting", r"Timed out waiting \d+ms for (recv|send) operation", sure=LIKELY),
            Pattern("observed flight recorder dump signal", sure=HINT),
            Pattern("stuck", r"processgroupnccl'?s watchdog got stuck|watchdog got stuck for", LIKELY),
        ),
        follows=(
            *("rank_killed", "rank_crashed", "nccl_remote_gone", "connection_lost", "collective_mismatch", "hang"),
            *("rendezvous_timeout", "cancelled"),
        ),
    ),
    Cause(
        "collective_mismatch",
        PROGRAM,
        "ranks called different collectives, or the same collective with different sizes",
        "look for code or data that differs between ranks, starting with the ranks listed; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL prints both calls; `recipes rehearse NAME` compares the layout with a single "
        "rank",
        (
            *phrases("detected mismatch between collectives", "mismatched collective", "collective_type_mismatch"),
            *phrases("sizeor_syntax_mismatch"),
            Pattern("preamble.length", r"enforce fail|op\.preamble"),
            Pattern("nccl warn", r"mismatch(ed)? (collective|count|op)", any_level=True),
            Pattern("but not all ranks", r"participated|called", LIKELY),
        ),
    ),
    Cause(
        "hang",
        ENDING,
        "the ranks make no progress, and none reports an error",
        "look at the stacks of the ranks listed for slow code or data, a lock or a disk; a rank without a stack was "
        "stopped or was lost with its node. Then run `recipes submit NAME --resume RUN`; with=fault_tolerance detects "
        "hangs earlier",
        (
            *phrases("no longer answers since step", "job is hanging", "hang detected"),
            Pattern("is stuck in", r"rank \d+.* is stuck in \w+ since step"),
            Pattern("not begun after", r"(has|have) not begun after \d+ s"),
            Pattern("no heartbeat of", r"no heartbeat of rank"),
            Pattern("did not get", r"Did not get (initial|subsequent) heartbeat", any_level=True),
            *phrases("heartbeat monitor timed out", "did not get subsequent section", sure=LIKELY),
            *phrases("soft timeout reached", sure=LIKELY),
        ),
        follows=("rank_killed", "rank_crashed", "gpu_lost", "program_error"),
    ),
    Cause(
        "rendezvous_timeout",
        ENDING,
        "not all ranks joined the rendezvous in time",
        "read the logs of the missing ranks, which did not start or cannot reach the first node; check MASTER_ADDR and "
        "the port from every node (`recipes cluster health PROFILE`)",
        (
            Pattern("clients joined", r"\d+/\d+ clients joined", sure=LIKELY),
            *phrases("rendezvoustimeouterror", "wait timeout after", sure=LIKELY),
            *phrases("timed out initializing process group", "timeout waiting for key", sure=LIKELY),
            *phrases("barrier timed out", "rendezvousconnectionerror", "rendezvousclosederror", sure=LIKELY),
            *phrases("the client socket has timed out after", sure=LIKELY),
            Pattern("rendezvous", r"(timed out|Timeout) ", sure=LIKELY),
            Pattern("socket timeout", r"Socket Timeout|socketTimeout|wait timeout after", LIKELY),
            Pattern("deadline_exceeded", r"(barrier|coordination|distributed|connect)", LIKELY),
            Pattern("barrier", r"store based barrier on rank.*(timed out|timeout)", sure=LIKELY),
            Pattern("tcp client failed to connect", r"timed out", sure=LIKELY),
        ),
        follows=(
            *("port_in_use", "rank_killed", "rank_crashed", "master_unreachable", "cancelled", "connection_lost"),
            *("nccl_timeout", "hang"),
        ),
        topics=r"\brendezvous\b|init_process_group",
    ),
    Cause(
        "master_unreachable",
        GROUND,
        "a rank cannot reach the first node: its name does not resolve, or its port does not respond",
        "MASTER_ADDR must be a name that every node resolves (getent hosts NAME), and its port must be open "
        "between nodes",
        (
            Pattern("gaierror", r"Name or service not known|Temporary failure|Errno -[235]", sure=LIKELY),
            Pattern("network addresses of", r"cannot be retrieved", LIKELY, alone=False, any_level=True),
            Pattern(
                "the client socket has failed to connect",
                r"Connection refused|No route|unreachable|errno: 1(11|13|01)",
                sure=LIKELY,
            ),
            *phrases("failed to connect to any network address", "no route to host", sure=LIKELY),
            *phrases("network is unreachable", "host not found", "unable to resolve hostname", sure=LIKELY),
            Pattern("connection refused", r"(store|socket|rendezvous|c10d|TCPStore|master|bootstrap)", LIKELY),
            Pattern(
                "connect",
                r"^(?!.*(http|client socket has timed|MESSAGE_TASK_EXIT))"
                r".*\bconnect\w*\b.*(refused|timed out|No route to host|unreachable)",
                LIKELY,
                alone=False,
                any_level=True,
            ),
            Pattern("connectionrefusederror", r"^(?!.*http)", LIKELY),
            Pattern("name or service not known", r"^(?!.*http|ssh:)", LIKELY),
            Pattern("could not resolve host", r"master|MASTER_ADDR|node", LIKELY),
        ),
        follows=("port_in_use", "no_network", "ssh_login"),
    ),
    Cause(
        "port_in_use",
        PROGRAM,
        "another process on that node uses the rendezvous port",
        "choose another port (MASTER_PORT, or torchrun --rdzv-endpoint HOST:0); a process of an earlier run may still "
        "use this one (ss -ltnp)",
        (
            *phrases("eaddrinuse", "address already in use", "failed to listen on any local network address"),
            Pattern("failed to bind", sure=LIKELY),
            Pattern("port", r"port \d+ is (already )?in use"),
        ),
    ),
    Cause(
        "connection_lost",
        ECHO,
        "a rank lost its connection to another rank, which has exited",
        "find the rank that exited first: `recipes logs RUN --all`; if none failed, test the network: "
        "`recipes cluster bisect PROFILE`",
        (
            *phrases("connection closed by peer", "connection reset by peer", sure=LIKELY),
            *phrases("stop_waiting response is expected", "brokenpipeerror", sure=LIKELY),
            *phrases("connection was likely closed", "failed to recv, got 0 bytes", "recvvalue failed", sure=LIKELY),
            *phrases("sendbytes failed", "recvvalueswithtimeout failed", "another rank has gone", sure=LIKELY),
            *phrases("successfully reached monitoredbarrier", "connectfullmesh failed", sure=LIKELY),
            Pattern("broken pipe", r"(Errno 32|\w+Error\b|sendBytes|writev)", LIKELY),
            Pattern("mpi communication peer process has unexpectedly disconnected", sure=LIKELY, any_level=True),
            Pattern("connectionerror", r"^(\w+\.)*Connection(Reset|Aborted)Error", HINT),
            Pattern("connection reset", r"^(\w+\.)*ConnectionResetError", HINT),
        ),
        follows=_GONE,
    ),
    Cause(
        "nccl_remote_gone",
        ECHO,
        "NCCL lost the connection to another rank, which has exited or is unreachable",
        "find the rank that exited first; if none did, test the links with `recipes cluster health PROFILE`, and set "
        "NCCL_DEBUG=INFO",
        (
            *phrases("ncclremoteerror", "remote process exited", "nccl communicator was aborted", sure=LIKELY),
            *phrases("nccl communicator encountered error set by", sure=LIKELY),
            Pattern("connection closed by remote peer", any_level=True, sure=LIKELY, alone=False),
            Pattern("aborted due to", r"NCCL.*(comm|work)", HINT),
            Pattern("socket recv failed", any_level=True, sure=HINT, alone=False),
            Pattern("socketprogress", r"Connection (closed|reset)|error", HINT, any_level=True, alone=False),
        ),
        follows=(*_GONE, "connection_lost"),
    ),
    Cause(
        "ib_link",
        GROUND,
        "an InfiniBand or RoCE link failed during the run: packets were not acknowledged, or a port went down",
        "`recipes cluster bisect PROFILE --nodes NODES` finds the node, and ibstat, ibdiagnet and the switch counters "
        "find the cable; exclude the node until it is repaired",
        (
            Pattern("got completion", r"NET/IBP?\s?: Got completion .*(error|status)", any_level=True, sure=LIKELY),
            Pattern(
                "net/ib", r"Got async (fatal )?event ?: ?(port error|.*fatal|QP|device)", any_level=True, alone=False
            ),
            Pattern("ibv_wc_retry_exc_err", any_level=True, sure=LIKELY),
            Pattern("retry count", r"\b(transport|rnr) retry count(er)? exceeded", any_level=True, sure=LIKELY),
            Pattern("ibv_poll_cq", r"fail|error", any_level=True, sure=LIKELY),
            Pattern(
                "mlx5",
                r"(Port: \d+ Link DOWN|link down|health compromised|fatal|cable is unplugged|syndrome)",
                LIKELY,
                any_level=True,
            ),
            Pattern("ib port", r"(down|inactive|not active|error)", LIKELY, any_level=True),
            Pattern("link_downed", r"[1-9]", LIKELY, any_level=True),
            Pattern("net/ib", r"Communication error|port (is )?down|Unable to.*connect", LIKELY, any_level=True),
            Pattern("infiniband", r"link (is )?down|port (is )?down|flap", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "ib_setup",
        GROUND,
        "NCCL cannot connect over the InfiniBand or RoCE devices that it selected",
        "NCCL_IB_HCA and NCCL_IB_GID_INDEX must name devices and GIDs that every node has and that can reach "
        "each other (ibstat, show_gids, ping); a container needs /dev/infiniband",
        (
            Pattern("net/ib : no device found", any_level=True, alone=False, sure=HINT),
            # The queue pair was never connected: its GID cannot be reached from here, regardless of the cable.
            Pattern("ibv_modify_qp failed", any_level=True, sure=LIKELY),
            *phrases("ibv_open_device", "ibv_get_device_list", "ibv_query_gid", pattern=r"fail|error", any_level=True),
            *phrases("unable to open device mlx", "no usable listening interface", any_level=True),
            *phrases("failed to initialize any net plugin", any_level=True),
            Pattern("failed to open libibverbs", any_level=True, alone=False, sure=LIKELY),
            Pattern("nccl_ib_hca", r"(not found|no match|invalid)", LIKELY, any_level=True),
            Pattern("failed to initialize net plugin", any_level=True, alone=False, sure=LIKELY),
        ),
        follows=("locked_memory_limit",),
        message_topics=r"\b(mlx\d|ibv|UCX)(?![a-z])|\bInfiniBand\b|\bRoCE\b",
    ),
    Cause(
        "network_interface",
        PROGRAM,
        "NCCL or Gloo found no network interface with the specified name, or selected the wrong one",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must name an interface that every node has (ip -br addr); "
        "unset them if the nodes differ",
        (
            *phrases("no socket interface found", "unable to find address for", "unable to find interface"),
            *phrases("ifa == nullptr"),
            Pattern("no interface found", r"NCCL|bootstrap|ifname", any_level=True),
            Pattern("address family not supported", sure=LIKELY, any_level=True),
            Pattern("gloo", r"makeDeviceFor(Interface|Hostname)", LIKELY),
            Pattern("failed to bind to", r"(ifname|interface)", LIKELY),
        ),
    ),
    Cause(
        "nvlink",
        GROUND,
        "NVLink or an NVSwitch reported an uncorrectable error",
        "drain the node and reset its GPUs; then run `nvidia-smi nvlink -e`, `dcgmi diag -r 3` and `recipes cluster "
        "health PROFILE`",
        (
            *phrases("uncorrectable nvlink error", "cudaerrornvlinkuncorrectable", "cuda_error_nvlink_uncorrectable"),
            Pattern("xid", r"Xid.*?: (74|14[4-9]|150)\b", any_level=True),
            Pattern(
                "nvlink",
                r"(uncorrectable|fatal|link (is )?(down|failed)|inactive|training failed|recovery error)",
                LIKELY,
            ),
            Pattern("sxid", r"SXid.*(fatal|Fatal)", any_level=True),
            Pattern("nvswitch", r"(fatal|failed|down|non-recoverable)", LIKELY),
        ),
    ),
    Cause(
        "fabric_manager",
        GROUND,
        "the GPUs of an NVSwitch system cannot communicate: Fabric Manager is not running, or its version does not "
        "match the driver",
        "run `systemctl status nvidia-fabricmanager` on the node, install the version that matches the driver, and "
        "reboot; NCCL_NVLS_ENABLE=0 only disables NVLink SHARP",
        (
            *phrases("system not yet initialized", "cudaerrorsystemnotready", "cuda_error_system_not_ready"),
            *phrases("error 802"),
            Pattern("fabric manager", r"(fail|error|not running|version mismatch|not initialized)"),
            Pattern("fabricmanager", r"(fail|error|not running|mismatch)", LIKELY),
            Pattern("nvls", r"(multicast|bind).*(fail|error)|Cuda failure.*(401|invalid|present state)"),
            Pattern("nvls", r"transport/nvls\.cc.*Cuda failure(?!.*initialization error)", LIKELY),
            Pattern("imex", r"(fail|error|not (running|ready))", LIKELY),
        ),
    ),
    Cause(
        "nccl_topology",
        PROGRAM,
        "NCCL's topology or graph file does not match this machine",
        "unset NCCL_TOPO_FILE and NCCL_GRAPH_FILE, or point them to the files for this type of node; "
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH prints what NCCL reads",
        (
            Pattern("nccl warn", r"graph/(xml|topo|search|paths|connect|rings|trees)\.\w+:\d+", LIKELY, any_level=True),
            Pattern("nccl_topo_file", r"(could not|fail|error|invalid|not found|mismatch)", LIKELY, any_level=True),
            Pattern("nccl_graph_file", r"(could not|fail|error|invalid|not found|mismatch)", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "nccl_versions",
        PROGRAM,
        "ranks run different versions of NCCL or of the program",
        "use the same image on every node; compare the nodes with `recipes doctor` and `recipes cluster check PROFILE`",
        (
            Pattern("mismatched nccl version"),
            Pattern("nccl version", r"mismatch|differ|incompatible"),
            Pattern("nccl", r"undefined symbol: nccl"),
            Pattern("ncclcommunknown", sure=HINT),
        ),
    ),
    Cause(
        "duplicate_gpu",
        PROGRAM,
        "two ranks use the same GPU",
        "use one rank per GPU: torch.cuda.set_device(LOCAL_RANK), --ntasks-per-node equal to the number of GPUs, and "
        "neither a CUDA_VISIBLE_DEVICES nor a --gpus-per-task with the same GPU for every rank",
        (
            Pattern("duplicate gpu detected", any_level=True),
            Pattern("ranks share", r"same (GPU|device)|one GPU", LIKELY),
            Pattern("overlapping devices", r"ranks", LIKELY),
        ),
    ),
    Cause(
        "nccl_system_error",
        GROUND,
        "a system call made by NCCL failed",
        "NCCL_DEBUG=INFO prints the call and the interface; `recipes cluster health PROFILE` tests the links "
        "between nodes",
        (
            *phrases("ncclsystemerror", "unhandled system error", sure=LIKELY),
            Pattern(
                "nccl warn",
                r"Call to (connect|bind|socket|ibv_\w+|recv|send|open) .*(fail|return)",
                LIKELY,
                alone=False,
                any_level=True,
            ),
            Pattern("bootstrap", r"NCCL WARN.*Bootstrap.*(fail|timed out|error|wrong)", LIKELY, any_level=True),
        ),
        follows=(
            *("ib_link", "ib_setup", "network_interface", "shared_memory_full", "locked_memory_limit", "port_in_use"),
            *("rank_killed", "rank_crashed", "nccl_remote_gone", "connection_lost", "open_files_limit", "nccl_timeout"),
            *("hang", "master_unreachable", "disk_full"),
        ),
    ),
    Cause(
        "nccl_internal",
        PROGRAM,
        "NCCL failed internally or in a CUDA call",
        "NCCL_DEBUG=WARN prints the call that failed; use a driver, NCCL and an image from the same release",
        (
            *phrases("ncclunhandledcudaerror", "ncclinternalerror", "ncclinvalidusage", sure=LIKELY),
            *phrases("proxy call to rank", "ncclinvalidargument", sure=LIKELY),
            Pattern("nccl error", r"NCCL error\b.*(internal|invalid|unhandled cuda|unknown)", LIKELY),
            Pattern("nccl warn", r"Cuda failure", LIKELY, alone=False, any_level=True),
        ),
        follows=(
            *("gpu_out_of_memory", "duplicate_gpu", "fabric_manager", "nvlink", "gpu_lost", "gpu_ecc", "gpu_xid"),
            *("gpu_illegal_access", "gpu_assert", "network_interface", "nccl_versions", "gpu_missing", "driver"),
            *("gpu_memory_fragmented", "gpu_memory_taken", "gpu_launch_failure", "connection_lost", "nccl_remote_gone"),
        ),
        topics=r"\bnccl\b",
    ),
    Cause(
        "rank_gone_slow",
        ENDING,
        "one GPU or node is slower than the others, which have to wait for it",
        "`recipes cluster bisect PROFILE --nodes NODES` finds the node; with=stragglers monitors the GPUs of a run",
        (
            Pattern("straggler", r"(detected|found|identified|GPU|rank|node).*\d", LIKELY, any_level=True),
            Pattern("stragglers", r"(detected|found|identified).*\d", LIKELY, any_level=True),
            Pattern("slowest rank", r"\d+(\.\d+)?x slower", HINT, alone=False, any_level=True),
        ),
        follows=("gpu_throttled", "ib_link"),
    ),
    Cause(
        "unused_parameters",
        PROGRAM,
        "a rank is waiting for gradients of parameters that do not contribute to the loss",
        "set find_unused_parameters=True for plain DDP, or use every parameter on every rank",
        (Pattern("expected to have finished reduction in the prior iteration"),),
    ),
)
