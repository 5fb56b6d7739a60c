"""Checks the gateway of docker-compose.yml, which has a profile of its own."""

import json
import urllib.request

from ops.compose_check.project import CheckFailed, ComposeProject


def answers_openai(project: ComposeProject) -> str:
    """Start the gateway, make a key, and stream an answer over HTTP as OpenAI's client asks."""
    project.change(COMPOSE_PROFILES="cpu,gateway")
    seconds = project.up()
    key = project.compose("run", "--rm", "-T", "keys", "create", "check").split()[-1]
    url = f"http://127.0.0.1:{project.variables['GATEWAY_PORT']}/v1/responses"
    body = {"model": "smollm2-135m-instruct", "input": "A story.", "stream": True}
    asked = urllib.request.Request(
        url,
        json.dumps(body | {"max_output_tokens": 64}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        text = answer.read().decode()
    if not text.endswith("data: [DONE]\n\n"):
        raise CheckFailed(f"the stream ends with {text[-80:]!r}")
    project.compose("stop", "gateway")
    (gateway,) = project.containers("gateway")
    code = gateway["State"]["ExitCode"]
    if code != 0:
        raise CheckFailed(f"the gateway ended with {code}")
    project.change(COMPOSE_PROFILES="cpu")
    events = text.count("event: ")
    return f"healthy after {seconds:.0f} s; a key, a stream of {events} events; exit status 0"
