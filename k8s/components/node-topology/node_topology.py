"""Write this machine's topology labels into a file, for the agent that starts next.

Asks the API server for the node NODE_NAME with the pod's own token, takes the labels that TOPOLOGY_LABELS names
(`theirs=ours`, with commas between), and writes them to TOPOLOGY_FILE as `key="value"` lines, the form of the
downward API. A label the machine does not have is left out. It fails, and the pod with it, if the API server
does not answer: a node in the wrong zone is worse than one that comes a minute later.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TRIES = 5
TIMEOUT_S = 10.0
RETRY_S = 2.0
ANSWER_BYTES_MAX = 4 * 1024 * 1024
# These will not be answered otherwise a little later.
FINAL = (401, 403, 404)


def read_labels(node_name: str, *, account: Path, server: str) -> dict[str, str]:
    """The labels of a node, as the API server tells them."""
    name = urllib.parse.quote(node_name, safe="")
    token = (account / "token").read_text().strip()
    request = urllib.request.Request(
        f"https://{server}/api/v1/nodes/{name}", headers={"Authorization": f"Bearer {token}"}
    )
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted) as answer:
        node = json.loads(answer.read(ANSWER_BYTES_MAX))
    labels: dict[str, str] = node["metadata"].get("labels", {})
    return labels


def chosen(labels: dict[str, str], wanted: str) -> dict[str, str]:
    """The labels under our names.

    >>> chosen({"example.com/rack": "r7", "other": "x"}, "example.com/rack=rack,example.com/row=row")
    {'rack': 'r7'}
    """
    pairs = [pair.strip().partition("=") for pair in wanted.split(",") if pair.strip()]
    return {ours or theirs: labels[theirs] for theirs, _, ours in pairs if labels.get(theirs)}


def main() -> int:
    node_name = os.environ["NODE_NAME"]
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    account = Path(os.environ.get("ACCOUNT_FOLDER", ACCOUNT))
    path = Path(os.environ["TOPOLOGY_FILE"])
    why = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(RETRY_S)
        try:
            found = chosen(
                read_labels(node_name, account=account, server=server), os.environ["TOPOLOGY_LABELS"]
            )
        except urllib.error.HTTPError as exc:
            why = f"{exc.code} {exc.reason}"
            if exc.code in FINAL:
                break
        except (OSError, ValueError, KeyError) as exc:
            why = str(exc)
        else:
            path.write_text("".join(f'{key}="{value}"\n' for key, value in sorted(found.items())))
            print(f"{node_name}: {found or 'none of the labels'}", file=sys.stderr)
            return 0
    print(
        f"the labels of node {node_name} cannot be read: {why}\n\n"
        "hint: may the service account `get` nodes? See role.yaml; its binding names a namespace",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
