/* A stand-in for pyxis, as a SPANK plugin: takes its srun options, and runs no container.
 *
 * What it does like pyxis: binds --container-mounts in a mount namespace of the task, hides the home directory unless it is
 * asked for, refuses an image that is not there, and lets the image's environment win over the job's, but for the names in
 * --container-env. What it does not: the root file system stays the node's. An "image" is a text file of NAME=VALUE lines.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(fake_pyxis, 1)

enum { IMAGE, MOUNTS, ENV, WORKDIR, HOME, NO_HOME, WRITABLE, COUNT };
static char *given[COUNT];

static int take(int which, const char *value, int remote)
{
    (void)remote;
    free(given[which]);
    given[which] = strdup(value ? value : "");
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "PATH", "[fake pyxis] a file that stands for an image", 1, IMAGE, take},
    {"container-mounts", "SRC:DST[,...]", "[fake pyxis] what is bound in the task's namespace", 1, MOUNTS, take},
    {"container-env", "NAME[,...]", "[fake pyxis] variables whose value in the job wins", 1, ENV, take},
    {"container-workdir", "PATH", "[fake pyxis] where the task starts", 1, WORKDIR, take},
    {"container-mount-home", NULL, "[fake pyxis] leave the home directory", 0, HOME, take},
    {"no-container-mount-home", NULL, "[fake pyxis] hide the home directory", 0, NO_HOME, take},
    {"container-writable", NULL, "[fake pyxis] accepted", 0, WRITABLE, take},
    SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t spank, int ac, char **av)
{
    (void)ac;
    (void)av;
    for (struct spank_option *each = options; each->name; each++)
        if (spank_option_register(spank, each) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

static int refuse(const char *what, const char *why)
{
    slurm_error("fake pyxis: %s: %s", what, why);
    return -1;
}

static void make_folders(const char *path)
{
    char *copy = strdup(path);
    for (char *at = copy + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(copy, 0755);
        *at = '/';
    }
    mkdir(copy, 0755);
    free(copy);
}

/* Sources are opened before the home directory is hidden: a mount may come from there. */
static int bind_mounts(spank_t spank)
{
    enum { MOST = 64 };
    char *targets[MOST], home[4096], rest_of[32];
    int sources[MOST], count = 0;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
        return refuse("mount namespace", strerror(errno));
    for (char *at = given[MOUNTS], *one; at && (one = strsep(&at, ",")) && count < MOST;) {
        char *source = strsep(&one, ":"), *target = one ? strsep(&one, ":") : source;
        if ((sources[count] = open(source, O_PATH | O_CLOEXEC)) < 0)
            return refuse(source, strerror(errno));
        targets[count++] = target;
    }
    if (!given[HOME] && spank_getenv(spank, "HOME", home, sizeof home) == ESPANK_SUCCESS)
        mount("none", home, "tmpfs", 0, NULL);
    for (int i = 0; i < count; i++) {
        make_folders(targets[i]);
        snprintf(rest_of, sizeof rest_of, "/proc/self/fd/%d", sources[i]);
        if (mount(rest_of, targets[i], NULL, MS_BIND | MS_REC, NULL))
            return refuse(targets[i], strerror(errno));
        close(sources[i]);
    }
    if (given[WORKDIR] && chdir(given[WORKDIR]))
        return refuse(given[WORKDIR], strerror(errno));
    return 0;
}

static int job_wins(const char *name)
{
    size_t length = strlen(name);
    for (const char *at = given[ENV]; at && (at = strstr(at, name)); at += length)
        if ((at == given[ENV] || at[-1] == ',') && (!at[length] || at[length] == ','))
            return 1;
    return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int ac, char **av)
{
    char line[4096], *value;
    (void)ac;
    (void)av;
    if (!given[IMAGE])
        return 0;
    FILE *image = fopen(given[IMAGE], "r");
    if (!image)
        return refuse(given[IMAGE], strerror(errno));
    while (fgets(line, sizeof line, image)) {
        line[strcspn(line, "\n")] = 0;
        if ((value = strchr(line, '='))) {
            *value++ = 0;
            if (!job_wins(line))
                spank_setenv(spank, line, value, 1);
        }
    }
    fclose(image);
    spank_setenv(spank, "FAKE_PYXIS_IMAGE", given[IMAGE], 1);
    return bind_mounts(spank);
}
