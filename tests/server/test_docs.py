"""What docs/lifecycle.md says of routes, and its example."""

import re
from pathlib import Path

from tests.server.harness import RunningServer
from tests.server.test_adapters import adapter_list

PAGE = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text()


def test_the_table_has_every_route_of_adapters(server: RunningServer):
    listed = set(re.findall(r"^\| `(\w+) (/v1/\S+)`", PAGE, re.MULTILINE))
    paths = server.http.get("/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods if "/v1/" in path}
    assert listed == {route for route in served if "lora" in route[1]}


def test_the_example_runs(server: RunningServer):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, object] = {"url": server.url}
    for _ in range(2):  # the second time it replaces the first
        exec(example, found)
    assert adapter_list(server)["policy"]["version"] == int(str(found["version"]))
    assert adapter_list(server)["policy"]["pinned"]
    assert server.says("policy") == "policy"
