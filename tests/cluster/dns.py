# SPDX-License-Identifier: Apache-2.0
"""The DNS of the cluster, as far as programs in pods need it: addresses of services, nothing of the world
outside.

    python -m tests.cluster.dns FOLDER ADDRESS PORT

Answers `NAME.NAMESPACE.svc.cluster.local` (IPv4, UDP) from what the API server says, at most a second old.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from tests.cluster.control_plane import Endpoints, request
from tests.cluster.pki import Pki

DOMAIN = "svc.cluster.local."
_TTL_S = 1
_MAX_BYTES = 4096

Addresses = Mapping[str, tuple[str, ...]]


def addresses(services: list[dict[str, Any]], endpoints: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """IPv4 addresses by `NAME.NAMESPACE`: a service's own one, or those behind it where it is headless."""
    behind: dict[str, tuple[str, ...]] = {}
    for entry in endpoints:
        found = [
            item["ip"] for subset in entry.get("subsets") or () for item in subset.get("addresses") or ()
        ]
        behind[_key(entry)] = tuple(found)
    known: dict[str, tuple[str, ...]] = {}
    for entry in services:
        own = entry["spec"].get("clusterIP")
        known[_key(entry)] = (own,) if own and own != "None" else behind.get(_key(entry), ())
    return known


def _key(entry: dict[str, Any]) -> str:
    return f"{entry['metadata']['name']}.{entry['metadata']['namespace']}"


def answer(query: dns.message.Message, known: Addresses) -> dns.message.Message:
    """The response to a query: NXDOMAIN for what is no service, no data for types other than A."""
    response = dns.message.make_response(query)
    response.flags |= dns.flags.AA
    question = query.question[0]
    name = question.name.to_text().lower()
    service = name.removesuffix(f".{DOMAIN}")
    if service == name or service not in known:
        response.set_rcode(dns.rcode.NXDOMAIN)
    elif question.rdtype == dns.rdatatype.A and known[service]:
        response.answer.append(
            dns.rrset.from_text(question.name, _TTL_S, dns.rdataclass.IN, dns.rdatatype.A, *known[service])
        )
    return response


def main() -> None:
    folder, address, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    pki, at = Pki(folder / "pki"), Endpoints(address=address)
    known: Addresses = {}
    asked_at = 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, port))
        while True:
            data, sender = sock.recvfrom(_MAX_BYTES)
            try:
                if time.monotonic() - asked_at > _TTL_S:
                    lists = [
                        request(pki, at, f"/api/v1/{kind}")["items"] for kind in ("services", "endpoints")
                    ]
                    known, asked_at = addresses(*lists), time.monotonic()
                sock.sendto(answer(dns.message.from_wire(data), known).to_wire(), sender)
            except Exception:
                # A question that cannot be answered is asked again; a server that has ended is not.
                logging.exception("a question from %s", sender[0])


if __name__ == "__main__":
    main()
