"""What `recipes submit` refuses of its command line and its profile, before anything is built or asked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


def refuse_webhook(profile: Cluster) -> None:
    """Refuse a webhook that no job could reach: a variable that is not set here, a file that others can read.

    Raises:
        UserError: with what is wrong, and never with the address.
    """
    from superpod.runtime.attempts import notify

    table = profile.notify
    if profile.login.host:
        if table.webhook_env:
            hint = f"write the address into a file of mode 0600 on {profile.login.host}: notify.webhook_file"
            raise UserError("notify.webhook_env: a variable of this shell does not travel over SSH", hint)
        return
    if table.webhook_env and profile.chain.self_submit:
        hint = "write the address into a file of mode 0600: notify.webhook_file"
        raise UserError("notify.webhook_env: jobs that jobs submit (chain.self_submit) do not get this variable", hint)
    _, problem = notify.address(table.webhook_env, table.webhook_file, os.environ)
    if problem:
        raise UserError(f"[notify] of {profile.name}: {problem}", "docs/slurm.md, Messages; or leave the key out")


def refuse_time(time: str) -> None:
    """Refuse a time limit that is none of Slurm's; '' is no limit. Raises UserError."""
    from superpod.slurm.profiles import profiles

    if time:
        try:
            profiles.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "write it like 4:00:00 or 1-12:00:00") from None
