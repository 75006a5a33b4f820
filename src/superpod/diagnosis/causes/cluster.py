"""Causes: Slurm, containers, and signals from outside the run."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, ECHO, ENDING, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "time_limit",
        ENDING,
        "the job reached its time limit",
        "`recipes submit NAME --resume RUN` resumes it; set a longer limit with --time, or save more often with a "
        "smaller log.ckpt.every_n_train_steps",
        (
            Pattern("due to time limit", any_level=True),
            Pattern(
                "time limit",
                r"(job|step|run|reached|exceeded|exhausted|killed).*time ?limit|time ?limit (reached|exceeded"
                r"|exhausted|is near)",
                LIKELY,
            ),
            Pattern("timelimit", r"State\S*\s*[=:]?\s*TIMEOUT|Reason=TimeLimit", LIKELY),
            Pattern("timeout", r"\b(JobState|State|ended)\s*[=:]?\s*TIMEOUT\b"),
            Pattern("exiting program after", r"\d+(\.\d+)? minutes", LIKELY),
            Pattern("statelesstimer", r"(limit|stop)", LIKELY),
            Pattern("max_time", r"(reached|Elapsed)", LIKELY),
        ),
        follows=("hang", "nccl_timeout", "rank_killed", "rank_crashed"),
    ),
    Cause(
        "preempted",
        ENDING,
        "the job was preempted by a job with a higher priority, or a spot instance was reclaimed",
        "Slurm requeues it, or `recipes submit NAME --resume RUN` resumes it; if available, use a QOS that is"
        " not preempted",
        (
            Pattern("due to preemption", any_level=True),
            Pattern(
                "preempt",
                r"(was|were|been|job|job is|being|got) preempted|PREEMPTED\b|preemption (notice|signal|event|request)",
                CERTAIN,
                any_level=True,
            ),
            Pattern("spot instance", r"(interrupt|reclaim|terminat|evict)", any_level=True),
            Pattern("maintenance event", r"TERMINATE|host", LIKELY, any_level=True),
            Pattern("requeue", r"(job|JOB) .*(was )?requeued|DUE TO JOB REQUEUE", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "cancelled",
        ENDING,
        "the job was cancelled by scancel or Ctrl-C",
        "`recipes submit NAME --resume RUN` (or `recipes run NAME --resume RUN`) resumes it; `sacct -j JOB -o State` "
        "shows who cancelled it",
        (
            Pattern(
                "cancelled", r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ ?(DUE TO SIGNAL [^*]+)?\*\*\*", any_level=True
            ),
            Pattern(
                "cancelled",
                r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ ?(DUE TO SIGNAL [^*]+)?\*\*\*",
                HINT,
                any_level=True,
            ),
            Pattern("cancelled", r"CANCELLED by \d+|cancelled by (the )?user|Job \d+ (was )?cancelled"),
            Pattern("keyboardinterrupt", sure=LIKELY),
            *phrases("detected keyboardinterrupt", "stopped by the user"),
            Pattern("sigint", r"(got|received|death|signal)\b.*SIGINT|SIGINT.*(received|caught)", LIKELY),
        ),
        follows=("hang", "nccl_timeout", "rank_killed", "rank_crashed"),
    ),
    Cause(
        "launcher_killed",
        ENDING,
        "the process that started the ranks was killed, and the ranks ended with it",
        "resume the run; start long runs in tmux or as a job (`recipes submit`), and find out what killed the process, "
        "such as lack of host memory or a logout",
        (
            Pattern("its launcher", r"was killed"),
            *phrases("ended without a result", "ended without a word"),
            Pattern("killed with its job or its node", sure=HINT),
        ),
        follows=("host_out_of_memory",),
    ),
    Cause(
        "terminal_closed",
        ENDING,
        "the terminal or SSH session that started the run was closed (SIGHUP)",
        "start it in tmux, with nohup and setsid, or as a job: `recipes submit`",
        (
            Pattern("signal: 1", r"got signal: 1\b"),
            Pattern("sighup"),
            Pattern("hangup", r"tasks? [\d,-]+: Hangup|^Hangup", LIKELY),
        ),
    ),
    Cause(
        "terminated",
        ECHO,
        "a rank received SIGTERM, either because another rank had failed or from outside the run",
        "find the rank that ended first with `recipes logs RUN --all`; otherwise, run `sacct -j JOB -o State,Reason`",
        (
            *phrases("sigterm", "got signal: 15", "signalexception", "exit code 143", sure=LIKELY),
            Pattern("terminated", r"tasks? [\d,-]+: Terminated|^Terminated$", LIKELY),
            Pattern("exitcode", r"exitcode\s*[:=]\s*-15\b", LIKELY),
            *phrases("force terminated", "terminating job step", "job step aborted", sure=HINT),
        ),
        follows=(
            *("rank_killed", "rank_crashed", "rank_aborted", "connection_lost", "nccl_remote_gone", "hang"),
            *("cancelled", "nccl_timeout", "terminal_closed"),
        ),
    ),
    Cause(
        "container_mount",
        PROGRAM,
        "the container did not start: a path to mount does not exist on the node or may not be mounted",
        "compare container.mounts in the profile with the node (`recipes cluster check PROFILE`): SRC must exist on "
        "the node, and the parent of DST in the image",
        (
            *phrases("failed to mount", "invalid mount", "invalid volume specification", "error mounting"),
            *phrases("container creation failed: mount"),
            Pattern("mountvolume", r"fail|error"),
            Pattern(
                "mount",
                r"(bind mount|mount (point|source|path|target))\b.*(fail|error|denied|not exist|No such|invalid)",
            ),
            Pattern("failed to resolve path", r"(mount|container|No such|Not a directory)", LIKELY),
        ),
    ),
    Cause(
        "container_image",
        PROGRAM,
        "the container image could not be pulled or unpacked",
        "check the image name, the registry credentials (~/.config/enroot/.credentials) and the free space for its "
        "layers, or import the image once and use the .sqsh file",
        (
            *phrases("failed to import docker image", "failed to import container image", "manifest unknown"),
            *phrases("imagepullbackoff", "errimagepull", "pull access denied", "failed to pull", "no such image"),
            *phrases("error pulling image"),
            *phrases("could not process json input", "error response from daemon", sure=LIKELY),
            Pattern("url https://", r"returned error code: 40[134]", LIKELY),
            Pattern("failed to extract", r"layer|squashfs|image", LIKELY),
        ),
        follows=("disk_full", "quota", "permission", "container_mount"),
    ),
    Cause(
        "container_start",
        PROGRAM,
        "the container did not start",
        "read the messages of pyxis or the container runtime, and reproduce the failure on one node with "
        "`srun --container-image=... true`",
        (
            *phrases("container start failed", "couldn't start container", "oci runtime create failed", sure=LIKELY),
            *phrases("failed to unshare", sure=LIKELY),
            Pattern("spank_pyxis.so", r"failed with rc", LIKELY),
            Pattern("could not select device driver", sure=CERTAIN),
            Pattern("nvidia-container-cli", r"error|fail"),
            Pattern("enroot-switchroot", r"fail|error"),
            Pattern("fatal:", r"(apptainer|singularity|container creation failed|image)", LIKELY),
            Pattern("crashloopbackoff", sure=HINT, any_level=True),
        ),
        follows=("container_mount", "container_image", "disk_full", "permission", "quota", "driver", "gpu_missing"),
        message_topics=r"\b(pyxis|enroot|containers?|docker|apptainer|singularity|podman)\b",
    ),
    Cause(
        "slurm_refused",
        PROGRAM,
        "Slurm rejected the job or its step",
        "`recipes submit NAME --dry-run` checks partition, account, QOS, time, nodes and GPUs; `recipes cluster check "
        "PROFILE` compares the profile with Slurm",
        (
            *phrases("batch job submission failed", "allocation failure", "unable to allocate resources"),
            *phrases("unable to create step", "invalid generic resource", "unable to confirm allocation"),
            Pattern("job/step already completing", sure=HINT),
            Pattern("slurm", r"Slurm (temporarily )?(unable|cannot|backup)|Unable to contact slurm", LIKELY),
            Pattern("invalid job id specified", sure=LIKELY),
            Pattern("unrecognized option", r"(srun|sbatch)", any_level=True),
            Pattern("fatal:", r"^(srun|sbatch|salloc): fatal:", LIKELY),
            Pattern("job credential", r"(expired|invalid|revoked)|Invalid job credential"),
        ),
        follows=("node_failed",),
        message_topics=r"\b(slurm|srun|sbatch)\b",
    ),
    Cause(
        "ssh_login",
        PROGRAM,
        "a launcher could not reach a node over SSH, or could not log in",
        "install a key without a passphrase on every node, accept the host keys, and test `ssh NODE true` on the first "
        "node; check the names and the port in the host file; Slurm's srun does not need SSH",
        (
            *phrases("permission denied (publickey", "host key verification failed", any_level=True),
            Pattern("permission denied, please try again", any_level=True, sure=LIKELY),
            Pattern(
                "ssh",
                r"ssh exited with exit code 255|^ssh: |Command 'ssh .* exit status 255|"
                r"kex_exchange_identification|ssh_exchange_identification",
                any_level=True,
            ),
            Pattern("passwordless", r"ssh", LIKELY, any_level=True),
        ),
        message_topics=r"\b(ssh|pdsh)\b",
    ),
    Cause(
        "mpi_plugin",
        PROGRAM,
        "srun cannot start the ranks: this Slurm installation does not have the requested MPI plugin",
        '`srun --mpi=list` lists the plugins; set slurm.mpi = "none" in the profile, since PyTorch does not use MPI',
        (
            Pattern("mpi plugin", r"(invalid|couldn't find|cannot|not found|unable)"),
            Pattern("mpi/pmix", r"(error|fail|couldn't|cannot|unable|not)"),
            Pattern("pmix", r"(PMIX ERROR|pmix\S* (fail|error)|p_pmix|PMIX_INIT)", LIKELY),
            Pattern("pmi2", r"(fail|error|cannot|unable)", LIKELY),
            Pattern("invalid mpi type"),
            Pattern("error occurred in mpi_init", sure=LIKELY, any_level=True),
            Pattern("task", r"task \d+ launch failed|Task launch for \S+ failed", LIKELY),
            Pattern("orte", r"ORTE (was unable|does not)|orte_init failed", LIKELY),
        ),
        follows=("node_failed", "container_start", "container_mount"),
        message_topics=r"\bp?mpi(x|run|exec)?\b",
    ),
    Cause(
        "command_missing",
        PROGRAM,
        "a command or interpreter of the job does not exist on the node or in the container",
        "check software.python and PATH in the profile; `recipes cluster check PROFILE` tests them on a node",
        (
            Pattern("command not found", any_level=True),
            Pattern("execve()", r"No such file|Permission|Exec format", any_level=True),
            Pattern("exec", r"(exec format error|executable file not found)"),
            Pattern("exit code 12", r"exit code 12[67]\b", LIKELY),
            Pattern("bad interpreter"),
            Pattern(
                "no such file or directory", r"(^(/usr/bin/)?env:|/bin/(ba)?sh:|exec:|execvp|couldn't (exec|chdir))"
            ),
            Pattern(
                "module", r"(Lmod|ModuleCmd_Load|module).*(unknown|Unable to locate a modulefile|cannot be loaded)"
            ),
        ),
        follows=("container_start", "container_mount"),
    ),
)
