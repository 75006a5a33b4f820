"""Causes: Slurm, containers, and whoever ends a run from outside."""

from __future__ import annotations

from superpod.diagnosis.causes.table import CERTAIN, ECHO, ENDING, HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "time_limit",
        ENDING,
        "the job reached its time limit",
        "`recipes submit NAME --resume RUN` goes on; --time for a longer one, or a smaller "
        "log.ckpt.every_n_train_steps "
        "so that "
        "less is lost",
        (
            Sign("due to time limit", any_level=True),
            Sign(
                "time limit",
                r"(job|step|run|reached|exceeded|exhausted|killed).*time ?limit|time ?limit (reached|exceeded"
                r"|exhausted|is near)",
                LIKELY,
            ),
            Sign("timelimit", r"State\S*\s*[=:]?\s*TIMEOUT|Reason=TimeLimit", LIKELY),
            Sign("timeout", r"\b(JobState|State|ended)\s*[=:]?\s*TIMEOUT\b"),
            Sign("exiting program after", r"\d+(\.\d+)? minutes", LIKELY),
            Sign("statelesstimer", r"(limit|stop)", LIKELY),
            Sign("max_time", r"(reached|Elapsed)", LIKELY),
        ),
        follows=("hang", "nccl_timeout", "rank_killed", "rank_crashed"),
    ),
    Cause(
        "preempted",
        ENDING,
        "the job was preempted by one of a higher priority, or a spot machine was taken back",
        "nothing is wrong: Slurm requeues it or `recipes submit NAME --resume RUN` goes on; a QOS that is not "
        "preempted where you have one",
        (
            Sign("due to preemption", any_level=True),
            Sign(
                "preempt",
                r"(was|were|been|job|job is|being|got) preempted|PREEMPTED\b|preemption (notice|signal|event|request)",
                CERTAIN,
                any_level=True,
            ),
            Sign("spot instance", r"(interrupt|reclaim|terminat|evict)", any_level=True),
            Sign("maintenance event", r"TERMINATE|host", LIKELY, any_level=True),
            Sign("requeue", r"(job|JOB) .*(was )?requeued|DUE TO JOB REQUEUE", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "cancelled",
        ENDING,
        "somebody ended the job: scancel, or Ctrl-C",
        "`recipes submit NAME --resume RUN` (or `recipes run ... --resume RUN`) goes on; sacct -j JOB -o State names "
        "who "
        "did it",
        (
            Sign("cancelled", r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ ?(DUE TO SIGNAL [^*]+)?\*\*\*", any_level=True),
            Sign(
                "cancelled",
                r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ ?(DUE TO SIGNAL [^*]+)?\*\*\*",
                HINT,
                any_level=True,
            ),
            Sign("cancelled", r"CANCELLED by \d+|cancelled by (the )?user|Job \d+ (was )?cancelled"),
            Sign("keyboardinterrupt", sure=LIKELY),
            Sign("detected keyboardinterrupt", sure=CERTAIN),
            Sign("sigint", r"(got|received|death|signal)\b.*SIGINT|SIGINT.*(received|caught)", LIKELY),
            Sign("stopped by the user"),
        ),
        follows=("hang", "nccl_timeout", "rank_killed", "rank_crashed"),
    ),
    Cause(
        "launcher_killed",
        ENDING,
        "the process that had started the ranks was killed, and they ended with it",
        "resume; start long runs in tmux or as a job (`recipes submit`), and see who killed it: host memory, a logout",
        (
            Sign("its launcher", r"was killed"),
            Sign("ended without a result"),
            Sign("ended without a word"),
            Sign("killed with its job or its node", sure=HINT),
        ),
        follows=("host_out_of_memory",),
    ),
    Cause(
        "terminal_closed",
        ENDING,
        "the terminal or the SSH session that started the run was closed (SIGHUP)",
        "start it in tmux, with nohup and setsid, or as a job: `recipes submit`",
        (
            Sign("signal: 1", r"got signal: 1\b"),
            Sign("sighup"),
            Sign("signals.sighup"),
            Sign("hangup", r"tasks? [\d,-]+: Hangup|^Hangup", LIKELY),
        ),
    ),
    Cause(
        "terminated",
        ECHO,
        "a rank was asked to end (SIGTERM) after another had failed, or by whoever runs the machine",
        "look for the rank that ended first: `recipes logs RUN --all`; else sacct -j JOB -o State,Reason",
        (
            Sign("sigterm", sure=LIKELY),
            Sign("got signal: 15", sure=LIKELY),
            Sign("terminated", r"tasks? [\d,-]+: Terminated|^Terminated$", LIKELY),
            Sign("exitcode", r"exitcode\s*[:=]\s*-15\b", LIKELY),
            Sign("signalexception", sure=LIKELY),
            Sign("force terminated", sure=HINT),
            Sign("terminating job step", sure=HINT),
            Sign("job step aborted", sure=HINT),
            Sign("exit code 143", sure=LIKELY),
        ),
        follows=(
            *(
                "rank_killed",
                "rank_crashed",
                "rank_aborted",
                "connection_lost",
                "nccl_remote_gone",
                "hang",
                "cancelled",
            ),
            *("nccl_timeout", "terminal_closed"),
        ),
    ),
    Cause(
        "container_mount",
        PROGRAM,
        "the container did not start: a path to mount is missing on the node, or may not be mounted",
        "container.mounts of the profile against the node (`recipes cluster check PROFILE`); SRC must exist there, "
        "DST's "
        "parent in the image",
        (
            Sign("failed to mount"),
            Sign("invalid mount", sure=CERTAIN),
            Sign("bind source path does not exist"),
            Sign("invalid volume specification"),
            Sign("error mounting"),
            Sign("mountvolume", r"fail|error"),
            Sign(
                "mount",
                r"(bind mount|mount (point|source|path|target))\b.*(fail|error|denied|not exist|No such|invalid)",
            ),
            Sign("failed to resolve path", r"(mount|container|No such|Not a directory)", LIKELY),
            Sign("container creation failed: mount"),
        ),
    ),
    Cause(
        "container_image",
        PROGRAM,
        "the container's image could not be fetched or unpacked",
        "the name of the image, a login for its registry (~/.config/enroot/.credentials), room for its layers; "
        "import it once "
        "and name the .sqsh file",
        (
            Sign("failed to import docker image"),
            Sign("failed to import container image"),
            Sign("could not process json input", sure=LIKELY),
            Sign("manifest unknown"),
            Sign("imagepullbackoff"),
            Sign("errimagepull"),
            Sign("pull access denied"),
            Sign("failed to pull"),
            Sign("error response from daemon", sure=LIKELY),
            Sign("no such image"),
            Sign("error pulling image"),
            Sign("url https://", r"returned error code: 40[134]", LIKELY),
            Sign("failed to extract", r"layer|squashfs|image", LIKELY),
        ),
        follows=("disk_full", "quota", "permission", "container_mount"),
    ),
    Cause(
        "container_start",
        PROGRAM,
        "the container did not start",
        "the lines of pyxis or the runtime below it name the step; `srun --container-image=... true` on one node "
        "shows it",
        (
            Sign("container start failed", sure=LIKELY),
            Sign("couldn't start container", sure=LIKELY),
            Sign("oci runtime create failed", sure=LIKELY),
            Sign("spank_pyxis.so", r"failed with rc", LIKELY),
            Sign("could not select device driver", sure=CERTAIN),
            Sign("nvidia-container-cli", r"error|fail"),
            Sign("enroot-switchroot", r"fail|error"),
            Sign("failed to unshare", sure=LIKELY),
            Sign("fatal:", r"(apptainer|singularity|container creation failed|image)", LIKELY),
            Sign("crashloopbackoff", sure=HINT, any_level=True),
        ),
        follows=("container_mount", "container_image", "disk_full", "permission", "quota", "driver", "gpu_missing"),
    ),
    Cause(
        "slurm_refused",
        PROGRAM,
        "Slurm did not take the job or its step",
        "`recipes submit ... --dry-run` checks partition, account, QOS, time, nodes and GPUs first; "
        "`recipes cluster check PROFILE` compares the profile with Slurm",
        (
            Sign("batch job submission failed"),
            Sign("allocation failure"),
            Sign("unable to allocate resources"),
            Sign("unable to create step"),
            Sign("invalid account or account/partition"),
            Sign("requested node configuration is not available"),
            Sign("more processors requested than permitted"),
            Sign("invalid generic resource"),
            Sign("invalid qos specification"),
            Sign("job violates accounting/qos policy"),
            Sign("invalid partition name"),
            Sign("requested time limit is invalid"),
            Sign("unable to confirm allocation"),
            Sign("job/step already completing", sure=HINT),
            Sign("unable to contact slurm controller", sure=LIKELY),
            Sign("slurm_", r"Slurm (temporarily )?(unable|cannot|backup)|Unable to contact slurm", LIKELY),
            Sign("invalid job id specified", sure=LIKELY),
            Sign("unrecognized option", r"(srun|sbatch)", any_level=True),
            Sign("fatal:", r"^(srun|sbatch|salloc): fatal:", LIKELY),
            Sign("job credential", r"(expired|invalid|revoked)|Invalid job credential"),
        ),
        follows=("node_failed",),
    ),
    Cause(
        "ssh_login",
        PROGRAM,
        "a launcher could not reach a node by SSH, or not log in there",
        "a key without a password on every node (`ssh NODE true` from the first one), its host key known, the names "
        "and port of the host file; Slurm's own srun needs no SSH",
        (
            Sign("permission denied (publickey", any_level=True),
            Sign("permission denied, please try again", any_level=True, sure=LIKELY),
            Sign("host key verification failed", any_level=True),
            Sign(
                "ssh",
                r"ssh exited with exit code 255|^ssh: |Command 'ssh .* exit status 255|"
                r"kex_exchange_identification|ssh_exchange_identification",
                any_level=True,
            ),
            Sign("passwordless", r"ssh", LIKELY, any_level=True),
        ),
    ),
    Cause(
        "mpi_plugin",
        PROGRAM,
        "srun cannot start the ranks: the MPI plugin asked for is not in this Slurm",
        '`srun --mpi=list` shows what there is; mpi = "none" in the profile: PyTorch starts its own ranks',
        (
            Sign("mpi plugin", r"(invalid|couldn't find|cannot|not found|unable)"),
            Sign("mpi/pmix", r"(error|fail|couldn't|cannot|unable|not)"),
            Sign("pmix", r"(PMIX ERROR|pmix\S* (fail|error)|p_pmix|PMIX_INIT)", LIKELY),
            Sign("pmi2", r"(fail|error|cannot|unable)", LIKELY),
            Sign("invalid mpi type"),
            Sign("error occurred in mpi_init", sure=LIKELY, any_level=True),
            Sign("task", r"task \d+ launch failed|Task launch for \S+ failed", LIKELY),
            Sign("orte", r"ORTE (was unable|does not)|orte_init failed", LIKELY),
        ),
        follows=("node_failed", "container_start", "container_mount"),
    ),
    Cause(
        "command_missing",
        PROGRAM,
        "a command or interpreter of the job is not on that node or not in the container",
        "software.python or the PATH of the profile: `recipes cluster check PROFILE` looks on a node",
        (
            Sign("command not found", any_level=True),
            Sign("execve()", r"No such file|Permission|Exec format", any_level=True),
            Sign("exited with exit code 127", sure=LIKELY),
            Sign("exec", r"(exec format error|executable file not found)"),
            Sign("exit code 127", sure=LIKELY),
            Sign("exited with exit code 126", sure=LIKELY),
            Sign("bad interpreter"),
            Sign("no such file or directory", r"(^(/usr/bin/)?env:|/bin/(ba)?sh:|exec:|execvp|couldn't (exec|chdir))"),
            Sign("module", r"(Lmod|ModuleCmd_Load|module).*(unknown|Unable to locate a modulefile|cannot be loaded)"),
        ),
        follows=("container_start", "container_mount"),
    ),
)
