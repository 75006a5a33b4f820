"""Causes: communication between ranks: NCCL, Gloo, the rendezvous and the network."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, ECHO, ENDING, GROUND, HINT, LIKELY, PROGRAM, Cause, Sign

_GONE = ("rank_killed", "rank_crashed", "hang", "nccl_timeout", "collective_mismatch", "cancelled", "time_limit")

CAUSES = (
    Cause(
        "nccl_timeout",
        ENDING,
        "ranks timed out in a collective that not all ranks had reached",
        "read the log of the rank that did not reach it: `recipes logs RUN --rank R`; in the next run, set "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 to write flight-recorder dumps, which "
        "`recipes why` reads",
        (
            Sign("watchdog caught collective operation timeout", sure=LIKELY),
            Sign("collective operation timeout", sure=LIKELY),
            Sign("watchdog caught collective operation timeout", sure=LIKELY),
            Sign("worknccl(", r"ran for \d+ milliseconds before timing out", sure=LIKELY),
            Sign("timed out in monitoredbarrier", sure=LIKELY),
            Sign("some nccl operations have failed or timed out", sure=LIKELY),
            Sign("failed to pass monitoredbarrier", sure=LIKELY),
            Sign("timed out waiting", r"Timed out waiting \d+ms for (recv|send) operation", sure=LIKELY),
            Sign("observed flight recorder dump signal", sure=HINT),
            Sign("received a dump signal due to a collective timeout", sure=LIKELY),
            Sign("operation timed out!", sure=LIKELY),
            Sign("stuck", r"processgroupnccl'?s watchdog got stuck|watchdog got stuck for", LIKELY),
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
        "look for code or data that differs between ranks, starting with the rank named; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL prints both calls; `recipes rehearse NAME` compares the layout with a"
        " single rank",
        (
            Sign("detected mismatch between collectives"),
            Sign("preamble.length", r"enforce fail|op\.preamble"),
            Sign("collectives differ in the following"),
            Sign("mismatched collective"),
            Sign("nccl warn", r"mismatch(ed)? (collective|count|op)", any_level=True),
            Sign("but not all ranks", r"participated|called", LIKELY),
            Sign("collective_type_mismatch"),
            Sign("sizeor_syntax_mismatch"),
        ),
    ),
    Cause(
        "hang",
        ENDING,
        "no rank makes progress any more, and none reports an error",
        "look at the stack of the rank named: slow code or data, a lock, a disk; a rank without a stack was "
        "stopped or lost with its node. Then run `recipes submit NAME --resume RUN`; with=fault_tolerance "
        "detects hangs earlier",
        (
            Sign("no longer answers since step"),
            Sign("is stuck in", r"rank \d+.* is stuck in \w+ since step"),
            Sign("not begun after", r"(has|have) not begun after \d+ s"),
            Sign("no heartbeat of", r"no heartbeat of rank"),
            Sign("did not get", r"Did not get (initial|subsequent) heartbeat", any_level=True),
            Sign("heartbeat monitor timed out", sure=LIKELY),
            Sign("did not get subsequent section", sure=LIKELY),
            Sign("job is hanging"),
            Sign("hang detected"),
            Sign("soft timeout reached", sure=LIKELY),
        ),
        follows=("rank_killed", "rank_crashed", "gpu_lost", "program_error"),
    ),
    Cause(
        "rendezvous_timeout",
        ENDING,
        "not all ranks joined the rendezvous in time",
        "read the logs of the missing ranks: they did not start, or cannot reach the first node; check "
        "MASTER_ADDR and the port from every node; `recipes cluster health PROFILE`",
        (
            Sign("waiting for clients", r"Timed out after \d+ seconds waiting for clients", sure=LIKELY),
            Sign("clients joined", r"\d+/\d+ clients joined", sure=LIKELY),
            Sign("rendezvoustimeouterror", sure=LIKELY),
            Sign("rendezvous", r"(timed out|Timeout) ", sure=LIKELY),
            Sign("socket timeout", r"Socket Timeout|socketTimeout|wait timeout after", LIKELY),
            Sign("wait timeout after", sure=LIKELY),
            Sign("timed out initializing process group", sure=LIKELY),
            Sign("timeout waiting for key", sure=LIKELY),
            Sign("barrier timed out", sure=LIKELY),
            Sign("deadline_exceeded", r"(barrier|coordination|distributed|connect)", LIKELY),
            Sign("barrier", r"store based barrier on rank.*(timed out|timeout)", sure=LIKELY),
            Sign("rendezvousconnectionerror", sure=LIKELY),
            Sign("rendezvousclosederror", sure=LIKELY),
            Sign("the client socket has timed out after", sure=LIKELY),
            Sign("tcp client failed to connect", r"timed out", sure=LIKELY),
        ),
        follows=(
            *("port_in_use", "rank_killed", "rank_crashed", "master_unreachable", "cancelled", "connection_lost"),
            *("nccl_timeout", "hang"),
        ),
        about=r"\brendezvous\b|init_process_group",
    ),
    Cause(
        "master_unreachable",
        GROUND,
        "a rank cannot reach the first node: its name does not resolve, or its port does not answer",
        "MASTER_ADDR must be a name that every node resolves (getent hosts NAME), and its port must be open "
        "between nodes",
        (
            Sign("gaierror", r"Name or service not known|Temporary failure|Errno -[235]", sure=LIKELY),
            Sign("network addresses of", r"cannot be retrieved", LIKELY, alone=False, any_level=True),
            Sign(
                "the client socket has failed to connect",
                r"Connection refused|No route|unreachable|errno: 1(11|13|01)",
                sure=LIKELY,
            ),
            Sign("failed to connect to any network address", sure=LIKELY),
            Sign("no route to host", sure=LIKELY),
            Sign("network is unreachable", sure=LIKELY),
            Sign("connection refused", r"(store|socket|rendezvous|c10d|TCPStore|master|bootstrap)", LIKELY),
            Sign(
                "connect",
                r"^(?!.*(http|client socket has timed|MESSAGE_TASK_EXIT))"
                r".*\bconnect\w*\b.*(refused|timed out|No route to host|unreachable)",
                LIKELY,
                alone=False,
                any_level=True,
            ),
            Sign("connectionrefusederror", r"^(?!.*http)", LIKELY),
            Sign("host not found", sure=LIKELY),
            Sign("name or service not known", r"^(?!.*http|ssh:)", LIKELY),
            Sign("unable to resolve hostname", sure=LIKELY),
            Sign("could not resolve host", r"master|MASTER_ADDR|node", LIKELY),
        ),
        follows=("port_in_use", "no_network", "ssh_login"),
    ),
    Cause(
        "port_in_use",
        PROGRAM,
        "another process on that node uses the rendezvous port",
        "choose another port (MASTER_PORT, or torchrun --rdzv-endpoint HOST:0); a process of an earlier run "
        "may still hold it (ss -ltnp)",
        (
            Sign("eaddrinuse"),
            Sign("address already in use"),
            Sign("failed to bind", sure=LIKELY),
            Sign("failed to listen on any local network address"),
            Sign("port", r"port \d+ is (already )?in use"),
        ),
    ),
    Cause(
        "connection_lost",
        ECHO,
        "a rank lost its connection to another rank, which has exited",
        "find the rank that exited first: `recipes logs RUN --all`; if none failed, test the network: "
        "`recipes cluster bisect PROFILE`",
        (
            Sign("connection closed by peer", sure=LIKELY),
            Sign("connection reset by peer", sure=LIKELY),
            Sign("stop_waiting response is expected", sure=LIKELY),
            Sign("broken pipe", r"(Errno 32|\w+Error\b|sendBytes|writev)", LIKELY),
            Sign("brokenpipeerror", sure=LIKELY),
            Sign("connection was likely closed", sure=LIKELY),
            Sign("failed to recv, got 0 bytes", sure=LIKELY),
            Sign("recvvalue failed", sure=LIKELY),
            Sign("sendbytes failed", sure=LIKELY),
            Sign("recvvalueswithtimeout failed", sure=LIKELY),
            Sign("another rank has gone", sure=LIKELY),
            Sign("successfully reached monitoredbarrier", sure=LIKELY),
            Sign("connectfullmesh failed", sure=LIKELY),
            Sign("mpi communication peer process has unexpectedly disconnected", sure=LIKELY, any_level=True),
            Sign("connectionerror", r"^(\w+\.)*Connection(Reset|Aborted)Error", HINT),
            Sign("connection reset", r"^(\w+\.)*ConnectionResetError", HINT),
        ),
        follows=_GONE,
    ),
    Cause(
        "nccl_remote_gone",
        ECHO,
        "NCCL lost the connection to another rank, which has exited or is unreachable",
        "find the rank that exited first; if none did, test the links: `recipes cluster health PROFILE`, "
        "NCCL_DEBUG=INFO",
        (
            Sign("ncclremoteerror", sure=LIKELY),
            Sign("remote process exited or there was a network error", sure=LIKELY),
            Sign("remote process exited", sure=LIKELY),
            Sign("connection closed by remote peer", any_level=True, sure=LIKELY, alone=False),
            Sign("nccl communicator was aborted", sure=LIKELY),
            Sign("nccl communicator encountered error set by", sure=LIKELY),
            Sign("aborted due to", r"NCCL.*(comm|work)", HINT),
            Sign("socket recv failed", any_level=True, sure=HINT, alone=False),
            Sign("socketprogress", r"Connection (closed|reset)|error", HINT, any_level=True, alone=False),
        ),
        follows=(*_GONE, "connection_lost"),
    ),
    Cause(
        "ib_link",
        GROUND,
        "an InfiniBand or RoCE link failed during the run: packets were not acknowledged, or a port went down",
        "`recipes cluster bisect PROFILE --nodes NODES` finds the node; ibstat, ibdiagnet and the switch "
        "counters find the cable; exclude the node until it is repaired",
        (
            Sign("got completion from peer", r"status=\d+", any_level=True, sure=LIKELY),
            Sign("got completion", r"NET/IBP?\s?: Got completion .*(error|status)", any_level=True, sure=LIKELY),
            Sign("vendor err", r"NET/IB", any_level=True, sure=LIKELY),
            Sign("net/ib", r"Got async (fatal )?event ?: ?(port error|.*fatal|QP|device)", any_level=True, alone=False),
            Sign("ibv_wc_retry_exc_err", any_level=True, sure=LIKELY),
            Sign("transport retry counter exceeded", any_level=True, sure=LIKELY),
            Sign("rnr retry counter exceeded", any_level=True, sure=LIKELY),
            Sign("ibv_poll_cq", r"fail|error", any_level=True, sure=LIKELY),
            Sign(
                "mlx5",
                r"(Port: \d+ Link DOWN|link down|health compromised|fatal|cable is unplugged|syndrome)",
                LIKELY,
                True,
                True,
            ),
            Sign("ib port", r"(down|inactive|not active|error)", LIKELY, any_level=True),
            Sign("link_downed", r"[1-9]", LIKELY, any_level=True),
            Sign("net/ib", r"Communication error|port (is )?down|Unable to.*connect", LIKELY, any_level=True),
            Sign("infiniband", r"link (is )?down|port (is )?down|flap", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "ib_setup",
        GROUND,
        "NCCL cannot connect over the InfiniBand or RoCE devices that it selected",
        "NCCL_IB_HCA and NCCL_IB_GID_INDEX must name devices and GIDs that every node has and that can reach "
        "each other (ibstat, show_gids, ping); a container needs /dev/infiniband",
        (
            Sign("net/ib : no device found", any_level=True, alone=False, sure=HINT),
            # The queue pair was never connected: its GID cannot be reached from here, whatever the cable does.
            Sign("ibv_modify_qp failed", any_level=True, sure=LIKELY),
            Sign("ibv_open_device", r"fail|error", any_level=True),
            Sign("ibv_get_device_list", r"fail|error", any_level=True),
            Sign("ibv_query_gid", r"fail|error", any_level=True),
            Sign("unable to open device mlx", any_level=True),
            Sign("failed to open libibverbs", any_level=True, alone=False, sure=LIKELY),
            Sign("no usable listening interface", any_level=True),
            Sign("nccl_ib_hca", r"(not found|no match|invalid)", LIKELY, any_level=True),
            Sign("failed to initialize net plugin", any_level=True, alone=False, sure=LIKELY),
            Sign("failed to initialize any net plugin", any_level=True),
        ),
        follows=("locked_memory_limit",),
    ),
    Cause(
        "network_interface",
        PROGRAM,
        "NCCL or Gloo found no network interface of the given name, or selected the wrong one",
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must name an interface that every node has (ip -br addr); "
        "unset them if the nodes differ",
        (
            Sign("no socket interface found"),
            Sign("no interface found", r"NCCL|bootstrap|ifname", any_level=True),
            Sign("unable to find address for"),
            Sign("unable to find interface"),
            Sign("address family not supported", sure=LIKELY, any_level=True),
            Sign("ifa == nullptr"),
            Sign("gloo", r"makeDeviceFor(Interface|Hostname)", LIKELY),
            Sign("failed to bind to", r"(ifname|interface)", LIKELY),
        ),
    ),
    Cause(
        "nvlink",
        GROUND,
        "NVLink or an NVSwitch reported an uncorrectable error",
        "drain the node and reset its GPUs; then check `nvidia-smi nvlink -e`, dcgmi diag -r 3, `recipes "
        "cluster health PROFILE`",
        (
            Sign("uncorrectable nvlink error"),
            Sign("xid", r"Xid.*?: (74|14[4-9]|150)\b", any_level=True),
            Sign("cudaerrornvlinkuncorrectable"),
            Sign("cuda_error_nvlink_uncorrectable"),
            Sign(
                "nvlink",
                r"(uncorrectable|fatal|link (is )?(down|failed)|inactive|training failed|recovery error)",
                LIKELY,
            ),
            Sign("sxid", r"SXid.*(fatal|Fatal)", any_level=True),
            Sign("nvswitch", r"(fatal|failed|down|non-recoverable)", LIKELY),
        ),
    ),
    Cause(
        "fabric_manager",
        GROUND,
        "the GPUs of an NVSwitch machine cannot communicate: Fabric Manager is not running, or its version "
        "differs from the driver's",
        "check systemctl status nvidia-fabricmanager on that node, install the driver's version, and reboot; "
        "NCCL_NVLS_ENABLE=0 only avoids NVLink SHARP",
        (
            Sign("system not yet initialized"),
            Sign("cudaerrorsystemnotready"),
            Sign("cuda_error_system_not_ready"),
            Sign("error 802"),
            Sign("fabric manager", r"(fail|error|not running|version mismatch|not initialized)"),
            Sign("fabricmanager", r"(fail|error|not running|mismatch)", LIKELY),
            Sign("nvls", r"(multicast|bind).*(fail|error)|Cuda failure.*(401|invalid|present state)"),
            Sign("nvls", r"transport/nvls\.cc.*Cuda failure(?!.*initialization error)", LIKELY),
            Sign("imex", r"(fail|error|not (running|ready))", LIKELY),
        ),
    ),
    Cause(
        "nccl_topology",
        PROGRAM,
        "NCCL's topology or graph file does not match this machine",
        "unset NCCL_TOPO_FILE and NCCL_GRAPH_FILE, or point them to the files for this type of node; "
        "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH prints what NCCL reads",
        (
            Sign("nccl warn", r"graph/(xml|topo|search|paths|connect|rings|trees)\.\w+:\d+", LIKELY, any_level=True),
            Sign("nccl_topo_file", r"(could not|fail|error|invalid|not found|mismatch)", LIKELY, any_level=True),
            Sign("nccl_graph_file", r"(could not|fail|error|invalid|not found|mismatch)", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "nccl_versions",
        PROGRAM,
        "ranks run different versions of NCCL or of the program",
        "start every node from the same image; compare with `recipes doctor` on each node, `recipes cluster "
        "check PROFILE`",
        (
            Sign("mismatched nccl version"),
            Sign("nccl version", r"mismatch|differ|incompatible"),
            Sign("nccl", r"undefined symbol: nccl"),
            Sign("ncclcommunknown", sure=HINT),
        ),
    ),
    Cause(
        "duplicate_gpu",
        PROGRAM,
        "two ranks use the same GPU",
        "use one rank per GPU: torch.cuda.set_device(LOCAL_RANK), --ntasks-per-node equal to the number of "
        "GPUs, and no CUDA_VISIBLE_DEVICES or --gpus-per-task that gives every rank the same GPU",
        (
            Sign("duplicate gpu detected", any_level=True),
            Sign("ranks share", r"same (GPU|device)|one GPU", LIKELY),
            Sign("both on cuda device"),
            Sign("overlapping devices", r"ranks", LIKELY),
        ),
    ),
    Cause(
        "nccl_system_error",
        GROUND,
        "a system call of NCCL failed",
        "NCCL_DEBUG=INFO prints the call and the interface; `recipes cluster health PROFILE` tests the links "
        "between nodes",
        (
            Sign("ncclsystemerror", sure=LIKELY),
            Sign("unhandled system error", sure=LIKELY),
            Sign(
                "nccl warn",
                r"Call to (connect|bind|socket|ibv_\w+|recv|send|open) .*(fail|return)",
                LIKELY,
                False,
                True,
            ),
            Sign("bootstrap", r"NCCL WARN.*Bootstrap.*(fail|timed out|error|wrong)", LIKELY, True, True),
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
        "NCCL failed internally, or one of its CUDA calls did",
        "NCCL_DEBUG=WARN prints the call that failed; use a driver, an NCCL and an image of the same release",
        (
            Sign("ncclunhandledcudaerror", sure=LIKELY),
            Sign("ncclinternalerror", sure=LIKELY),
            Sign("ncclinvalidusage", sure=LIKELY),
            Sign("proxy call to rank", sure=LIKELY),
            Sign("ncclinvalidargument", sure=LIKELY),
            Sign("nccl error", r"NCCL error\b.*(internal|invalid|unhandled cuda|unknown)", LIKELY),
            Sign("nccl warn", r"Cuda failure", LIKELY, False, True),
        ),
        follows=(
            *("gpu_out_of_memory", "duplicate_gpu", "fabric_manager", "nvlink", "gpu_lost", "gpu_ecc", "gpu_xid"),
            *("gpu_illegal_access", "gpu_assert", "network_interface", "nccl_versions", "gpu_missing", "driver"),
            *("gpu_memory_fragmented", "gpu_memory_taken", "gpu_launch_failure", "connection_lost", "nccl_remote_gone"),
        ),
        about=r"\bnccl\b",
    ),
    Cause(
        "rank_gone_slow",
        ENDING,
        "one GPU or node is slower than the others, which wait for it",
        "`recipes cluster bisect PROFILE --nodes NODES` finds the node; with=stragglers keeps monitoring",
        (
            Sign("straggler", r"(detected|found|identified|GPU|rank|node).*\d", LIKELY, True, True),
            Sign("stragglers", r"(detected|found|identified).*\d", LIKELY, True, True),
            Sign("slowest rank", r"\d+(\.\d+)?x slower", HINT, False, True),
        ),
        follows=("gpu_throttled", "ib_link"),
    ),
    Cause(
        "unused_parameters",
        PROGRAM,
        "a rank waits for gradients of parameters that do not contribute to the loss",
        "set find_unused_parameters=True for plain DDP, or use every parameter on every rank",
        (
            Sign("expected to have finished reduction in the prior iteration"),
            Sign("parameter indices which did not receive grad", sure=CERTAIN),
            Sign("parameters that were not used in producing"),
        ),
    ),
)
