"""An import-linter contract: domain modules of a service import neither grpc nor generated code nor the edge's modules.

By induction they don't reach them indirectly either.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from importlinter import Contract, ContractCheck, fields, output

_WIRE = ("grpc", "google", "pagewire.v1", "pagewire.runtime.server", "pagewire.runtime.status")
_WIRE += ("pagewire.runtime.health", "pagewire.runtime.transport", "pagewire.sampling_wire", "pagewire.types_wire")
_WIRE += ("pagewire.runtime.spans", "opentelemetry")
_WIRE += ("pagewire.runtime.metrics", "pagewire.runtime.rpc_metrics")
_WIRE += ("pagewire.stats_wire",)


class DomainContract(Contract):  # type: ignore[misc]
    """`services`: root packages. `edge`: patterns for the last part of the names that may know the wire."""

    services = fields.ListField(subfield=fields.StringField())
    edge = fields.ListField(subfield=fields.StringField())

    def _is_edge(self, module: str) -> bool:
        return any(fnmatchcase(module.rsplit(".", 1)[-1], pattern) for pattern in self.edge)

    def _is_forbidden(self, importer: str, imported: str) -> bool:
        if any(imported == name or imported.startswith(f"{name}.") for name in _WIRE):
            return True
        is_same_service = imported.split(".", 1)[0] == importer.split(".", 1)[0]
        # LLM loads the in-process client; that is what the exception is for.
        return is_same_service and self._is_edge(imported) and not imported.endswith(".inprocess")

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        found = []
        for service in self.services:
            for module in sorted(graph.find_descendants(service)):
                if self._is_edge(module):
                    continue
                imported = sorted(graph.find_modules_directly_imported_by(module))
                found += [f"{module} -> {name}" for name in imported if self._is_forbidden(module, name)]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["found"]:
            output.print_error(line)
