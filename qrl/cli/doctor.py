"""`qrl doctor`: what the store lacks, a sentence for each."""

import click
from click import option

from qrl.errors import QrlError

_COLOURS = {"ok": "green", "advice": "yellow", "lacks": "red"}


@click.command("doctor")
@option("--registered_name", metavar="NAME", help="Try the rights on this registered model, too.")
def doctor_command(registered_name: str | None) -> None:
    """Check the store: access, versions, clock, space, rights; print which checkout runs.

    \b
    qrl doctor                                 the store here, or the one of MLFLOW_TRACKING_URI
    qrl doctor --registered_name qrl-tiny      rights on a registered model, too

    Rights are tried: a tag is set, and a small file written and deleted. Exit code 0: nothing is lacking; 1: something
    is. Advice changes no exit code.
    """
    import qrl
    from qrl import process
    from qrl.registry import registering
    from qrl.tracking import doctor

    if registered_name is not None:
        registering.check_name(registered_name)
    click.echo(f"qrl {qrl.__version__} in {process.ROOT}")
    lacks = 0
    for finding in doctor.examine(registered_name):
        if finding.level == doctor.LACKS:
            lacks += 1
        level = click.style(f"{finding.level:6}", fg=_COLOURS[finding.level])
        click.echo(f"{level}  {finding.about:8}  {finding.sentence}")
    if lacks:
        things = "thing" if lacks == 1 else "things"
        raise QrlError(f"The store lacks {lacks} {things}: see the lines above.")


COMMANDS = (doctor_command,)
