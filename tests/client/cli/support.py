"""Runs the `tokenmill` command in this process, as a shell would."""

from typer.testing import CliRunner, Result

from tokenmill.cli import app


class Shell:
    def __init__(self, redis_url: str, database: str) -> None:
        self.redis_url = redis_url
        self._where = {
            "TOKENMILL_REDIS_URL": redis_url,
            "TOKENMILL_DATABASE_URL": database,
            "TOKENMILL_QUEUE": "q",
            "COLUMNS": "200",
        }
        self._runner = CliRunner()

    def __call__(
        self, *arguments: str, stdin: str | None = None, environment: dict[str, str] | None = None
    ) -> Result:
        return self._runner.invoke(
            app, list(arguments), env=self._where | (environment or {}), input=stdin
        )
