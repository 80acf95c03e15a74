"""Terms of the loss that a batch of mixed samples lacks.

A branch of forward such as `if pixel_values is None` is taken for a batch, not for a sample: a term that it
adds for samples without an input is in the loss of a batch only if no sample has that input. The plan
computes the same, because coefficients are those of the batch's case (`sections/terms.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from secc.codegen.section_modules import TERMS_SECTION, bodies_of, body_patterns
from secc.ir.dialect.ops import GraphOp, TermOp
from secc.ir.text_io.verifier import source_line
from secc.runtime.plan.sample_predicates import describe_predicate, format_term
from secc.runtime.plan.schema import is_statistic, logged_scalar_name


def describe_left_out_terms(graph: GraphOp) -> Iterator[str]:
    """Yields a text for each term of the loss that samples of one case have alone, but not together with
    samples of another case."""
    terms_by_pattern: dict[frozenset[str], dict[str, str]] = {}
    for body in bodies_of(graph, TERMS_SECTION):
        found = {op.sym.data: source_line(op) for op in body.walk() if isinstance(op, TermOp)}
        for pattern in body_patterns(body) if found else ():
            terms_by_pattern.setdefault(frozenset(pattern), {}).update(found)
    told = set[str]()
    for pattern, terms in sorted(terms_by_pattern.items(), key=lambda item: sorted(item[0])):
        for name, where in terms.items():
            if name in told or is_statistic(name) or logged_scalar_name(name):
                continue
            lacking = [
                wider - pattern
                for wider, others in terms_by_pattern.items()
                if pattern < wider and name not in others
            ]
            if lacking:
                told.add(name)
                added = sorted(min(lacking, key=lambda keys: (len(keys), sorted(keys))))
                having = describe_predicate([format_term(sorted(pattern), added)])
                place = f" ({where})" if where else ""
                yield (
                    f"term {name} of the loss{place} is in batches of {having} only: in a batch that has "
                    f"{describe_predicate([format_term(added, [])])}, too, forward leaves it out for all, in "
                    "plain PyTorch and in the plan"
                )
