"""When the fusing passes insert operators: where the devices run Triton, unless the user says otherwise."""

from __future__ import annotations

from secc.cluster import parse_cluster
from secc.errors import UserError

FUSE_WHEN = ("auto", "always", "never")


def reason_not_to_fuse(when: str, cluster: str) -> str:
    """Why nothing is fused on a cluster (as `secc.cluster.parse_cluster` reads it), "" if rules may apply.
    Raises UserError for an unknown `when`."""
    if when not in FUSE_WHEN:
        raise UserError(
            f"unknown value {when!r} for option when of the fusion passes",
            remedy=f"expected {', '.join(FUSE_WHEN)}",
        )
    if when == "auto" and parse_cluster(cluster).device.backend != "cuda":
        return "on CPUs the operators take longer than the ops that they replace; --fuse puts them in"
    return "it is off" if when == "never" else ""
