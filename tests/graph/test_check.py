"""What ``Graph.check`` finds before anything moves: each message names the node and the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.errors import GraphError
from geartrain.graph.graph import Graph
from geartrain.graph.owners import Owner
from geartrain.graph.wiring import wire
from geartrain.parts.rules import Part

FLOATS = {"x": ((4,), torch.float32)}


def refused(graph: Graph, *words: str, shapes: Any = FLOATS) -> None:
    with pytest.raises(GraphError) as caught:
        graph.check(shapes)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def none(y: Tensor) -> Tensor:
    return y.square().flatten(1).sum(1)


def test_edge_columns_of_a_bundle_reach_the_dry_run():
    class Types(nn.Module):
        def forward(self, x: Tensor, inside: Any) -> Tensor:
            return x[:, :1] + inside.edges["type"].sum() + inside.segment[:, None]

    graph = Graph(edge=("type",))
    graph.input("x", bundle=True).through(Types(), inside=True).through(nn.Linear(3, 1)).loss(none)
    refused(graph, "'linear'", "(n, 1)")


def test_a_module_that_needs_the_values_of_its_edges_is_left_to_the_real_run():
    class Chosen(nn.Module):
        def forward(self, x: Tensor, inside: Any) -> Tensor:
            return x[inside.edges["type"] == 0]

    graph = Graph(edge=("type",))
    graph.input("x", bundle=True).through(Chosen(), inside=True).loss(none)
    graph.check(FLOATS)


def test_a_join_whose_key_nobody_knows_yet_asks_for_a_check():
    graph = Graph()
    x = graph.input("x")
    graph.concat(x, x.move(vertex=0)).loss(none)
    with pytest.raises(GraphError, match=r"'concat': its key is not known yet; call graph.check"):
        wire(graph, lambda t: [Owner(t.function, None)])
    graph.check()
    wire(graph, lambda t: [Owner(t.function, None)])


def test_a_join_on_named_columns_needs_no_check():
    graph = Graph()
    x = graph.input("x")
    graph.concat(x, x.through(torch.sin), on="vertex").loss(none)
    (join,) = [
        n
        for n in wire(graph, lambda t: [Owner(t.function, None)]).nodes.values()
        if n.name == "concat"
    ]
    assert join._on == [1]  # type: ignore[attr-defined]


def test_a_graph_without_input_is_refused():
    refused(Graph(), "no input", "graph.input(name)")


def test_a_stream_that_nobody_reads_is_refused_with_its_port():
    graph = Graph(vertex=("kind",))
    yes, _ = graph.input("x").where(lambda m: m.kind > 0, name="fork")
    yes.stop()
    refused(graph, "'fork' port no", ".stop()")


def test_a_loop_without_source_is_refused():
    graph = Graph()
    graph.input("x").stop()
    graph.loop(name="round").stop()
    refused(graph, "'round' has no source", "round.join(stream)")


def test_a_loop_that_no_row_can_leave_is_refused_with_its_path():
    graph = Graph()
    loop = graph.loop(name="round")
    loop.join(graph.input("x"))
    loop.join(loop.through(nn.Linear(4, 4), name="map"))
    refused(graph, "round → map → round can never end", "where()")


def test_a_walk_along_edges_ends_where_they_end_and_is_no_endless_loop():
    graph = Graph(edge=())
    loop = graph.loop(name="walk")
    loop.join(graph.input("x"))
    loop.through(nn.Linear(4, 1)).loss(none)
    loop.join(loop.flatmap("edge").move(vertex=lambda m: m.target))
    graph.check(FLOATS)


def test_a_loop_that_only_feeds_itself_can_never_get_a_row():
    graph = Graph(vertex=("kind",))
    graph.input("x").stop()
    loop = graph.loop(name="round")
    more, done = loop.where(lambda m: m.kind > 0)
    loop.join(more)
    done.stop()
    refused(graph, "can never get a row", "join a stream that starts at an input")


def test_an_unknown_column_of_a_predicate_is_named_with_those_that_can_be_read():
    graph = Graph(vertex=("kind",))
    yes, no = graph.input("x").where(lambda m: m.knid > 0, name="fork")
    yes.stop()
    no.stop()
    refused(graph, "'fork'", "'knid' is unknown", "'kind'", "Graph(vertex=")


@pytest.mark.parametrize("verb", ["read", "target", "weight", "metric", "size", "order", "move"])
def test_an_unknown_column_is_found_wherever_it_is_named(verb):
    from geartrain.nodes.loss import Metric

    graph = Graph(vertex=("kind",))
    x = graph.input("x")
    if verb == "read":
        x.through(lambda x, k: x, read="nix", name="here").stop()
    elif verb == "target":
        x.loss(none, target="nix", name="here")
    elif verb == "weight":
        x.loss(none, weight=lambda m: m.nix, name="here")
    elif verb == "metric":
        x.loss(none, metrics={"m": Metric(none, where=lambda m: m.nix > 0)}, name="here")
    elif verb == "size":
        x.group("vertex", "nix", name="here").stop()
    elif verb == "order":
        x.group("vertex", 2, order=lambda m: m.nix, name="here").stop()
    else:
        x.move(vertex=lambda m: m.nix, name="here").stop()
    refused(graph, "'here'", "'nix' is unknown")


def test_an_edge_column_where_rows_are_at_no_edge_is_refused():
    graph = Graph(edge=("type",))
    graph.input("x").move(vertex=lambda m: m.target, name="along").stop()
    told = ("behind flatmap('edge')", "has inside.edges['target']")
    refused(graph, "'along'", "'target' is not defined on the rows that come here", *told)


def test_a_state_column_that_not_all_sources_of_a_loop_define_is_not_defined_behind_it():
    graph = Graph()
    x = graph.input("x")
    merged = graph.merge(x, x.move(step=1))
    merged.move(vertex=lambda m: m.step, name="use").stop()
    refused(graph, "'use'", "'step' is not defined")


def test_payloads_that_do_not_fit_a_module_are_found_by_a_dry_run():
    graph = Graph()
    graph.input("x").through(nn.Linear(5, 2), name="map").loss(none)
    refused(graph, "'map': Linear", "float32 (n, 4)")


def test_a_module_that_drops_the_leading_dimension_is_refused():
    graph = Graph()
    graph.input("x").through(lambda x: x.sum(0), name="flat").stop()
    refused(graph, "'flat'", "(4,)", "leading dimension")


def test_a_module_that_returns_no_tensor_is_refused():
    graph = Graph()
    graph.input("x").through(lambda x: {"y": x}, name="dict").stop()
    refused(graph, "a module returned dict", "tuple of tensors")


def test_a_module_that_returns_a_tuple_in_a_tuple_is_told_where():
    graph = Graph()
    graph.input("x").through(lambda x: (x, (x, x)), name="nested").stop()
    refused(graph, "a module returned tuple that holds tuple at 1", "return h, c for return h, (h")


def test_a_module_that_wants_other_arguments_is_told_what_it_is_given():
    def wants(x: Tensor, token: Tensor) -> Tensor:
        return x

    graph = Graph(vertex=("place",))
    graph.input("x").through(wants, name="node").stop()
    refused(graph, "'node'", "'token'; it is called with 1 payload tensor; read= gives it columns")
    graph = Graph(vertex=("place", "token"))
    x = graph.input("x").through(lambda x: (x, x))
    x.through(wants, name="node", read=("place", "token")).stop()
    refused(
        graph, "called with 2 payload tensors, then columns place, token; inside=True an Inside"
    )
    graph = Graph(edge=())
    graph.input("x", bundle=True).through(wants, name="node", inside=True, read="vertex").stop()
    refused(graph, "with 1 payload tensor, then column vertex, then an Inside")


def test_edge_columns_that_a_graph_has_not_are_named():
    class Kinds(nn.Module):
        def forward(self, x: Tensor, inside: Any) -> Tensor:
            return x + inside.edges["kind"].sum()

    graph = Graph(edge=("type",))
    graph.input("x", bundle=True).through(Kinds(), name="kinds", inside=True).stop()
    refused(graph, "'kinds': Kinds asks its Inside for 'kind'", "has ['source', 'target', 'type']")


def test_a_key_error_of_a_module_itself_stays_what_it_is():
    graph = Graph(edge=("type",))
    graph.input("x", bundle=True).through(lambda x, inside: {}[3], inside=True).stop()
    with pytest.raises(KeyError, match="3"):
        graph.check(FLOATS)


def test_inside_and_pool_are_for_bundles():
    graph = Graph()
    graph.input("x").through(lambda x, inside: x, inside=True, name="in").stop()
    refused(graph, "'in': inside and pool are for bundles", "bundle=True")


def test_batch_norm_and_dropout_that_would_mix_or_redraw_are_refused():
    for module, word in (
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "BatchNorm1d (1)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), "Dropout (1)"),
    ):
        graph = Graph()
        graph.input("x").through(module, keep="inputs", name="net").loss(none)
        refused(graph, "'net'", word, "keep='graph'")
        graph = Graph()
        graph.input("x", bundle=True).through(module, keep="graph", name="net").loss(none)
        graph.check(FLOATS)


class Settled(nn.Sequential):
    """Its second module stays in evaluation."""

    def train(self, mode: bool = True) -> Settled:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_that_is_left_in_evaluation_mixes_nothing(mode):
    module = Settled(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(mode)
    modes = [inner.training for inner in module.modules()]
    graph = Graph()
    graph.input("x").through(module, keep="inputs", name="net").loss(none)
    graph.check(FLOATS)
    assert [inner.training for inner in module.modules()] == modes
    graph = Graph()
    mixing = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()  # until it is trained
    graph.input("x").through(mixing, keep="inputs", name="net").loss(none)
    refused(graph, "BatchNorm1d (1)", "have a train() that leaves it in evaluation")


def test_dropout_in_a_module_that_looks_inside_bundles_is_refused_with_what_may_be_done_instead():
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor, inside: object) -> Tensor:
            return self.drop(x)

    graph = Graph()
    graph.input("x", bundle=True).through(Drops(), inside=True, name="in").stop()
    graph.check(FLOATS)  # a program keeps what is drawn
    graph = Graph()
    graph.input("x", bundle=True).through(Drops(), inside=True, keep="inputs", name="in").stop()
    refused(graph, "'in': Dropout (drop)", "a node of its own before or behind", "or keep='graph'")


def test_activations_inside_bundles_without_a_kernel_are_refused():
    class Odd(nn.Module):
        def forward(self, x: Tensor, inside: object) -> Tensor:
            return x

    graph = Graph()
    stream = graph.input("x", bundle=True)
    stream.through(Odd(), keep="activations", inside=True, name="odd").stop()
    told = r"'odd': keep='activations' wants a bundle kernel.*keep='auto'"
    with pytest.raises(GraphError, match=told):
        wire(graph, lambda t: [Owner(t.function, None)])


def test_sources_of_a_merge_have_one_shape():
    graph = Graph(vertex=("kind",))
    a, b = graph.input("x").where(lambda m: m.kind > 0)
    graph.merge(a.through(nn.Linear(4, 2)), b, name="phi").stop()
    refused(graph, "'phi'", "(n, 2)", "(n, 4)", "one shape")


def test_bundles_and_single_rows_do_not_meet():
    for verb, word in (("merge", "ungroup the bundles first"), ("concat", "joined; hold() the")):
        graph = Graph()
        both = getattr(graph, verb)(
            graph.input("x"), graph.input("b", bundle=True), **{"name": "phi"}
        )
        both.stop()
        refused(graph, "'phi'", word)


def test_bundles_are_neither_split_nor_grouped():
    for verb, args in (("split", (2, 2)), ("group", ("vertex", 2))):
        graph = Graph()
        made = getattr(graph.input("x", bundle=True), verb)(*args, name="here")
        for stream in made if isinstance(made, tuple) else (made,):
            stream.stop()
        refused(graph, "'here': bundles cannot be")


def test_a_key_column_that_a_port_lacks_is_refused():
    graph = Graph()
    x = graph.input("x")
    graph.concat(x, x.move(step=0), on=("vertex", "step"), name="side").stop()
    refused(graph, "'side': key column 'step' is not on every port", "['instance', 'vertex']")


def test_concat_wants_one_tensor_a_stream_and_fitting_shapes():
    graph = Graph()
    x = graph.input("x")
    graph.concat(x, x.through(lambda x: (x, x)), name="side").stop()
    refused(graph, "'side'", "[1, 2] tensors", "how='tuple'")
    graph = Graph()
    x = graph.input("x")
    graph.concat(x, x.through(lambda x: x[:, None]), name="side").stop()
    refused(graph, "'side': cannot concatenate float32 (n, 4) and float32 (n, 1, 4)")


def test_pieces_of_a_split_add_up():
    graph = Graph()
    for piece in graph.input("x").split(3, 2, name="cut"):
        piece.stop()
    refused(graph, "'cut': pieces (3, 2) add up to 5", "(n, 4)")


def test_ungroup_wants_parts():
    graph = Graph()
    graph.input("x").through(lambda x: x.sum(1)).ungroup(name="apart").stop()
    refused(graph, "'apart': rows of float32 (n,) have no parts")


def test_ungroup_wants_as_many_parts_of_all_tensors():
    graph = Graph()
    pieces = graph.input("x").through(lambda x: (x[:, None], x.reshape(-1, 2, x.shape[1] // 2)))
    pieces.ungroup(name="apart").stop()
    told = "'apart': rows of float32 (n, 1, 4), float32 (n, 2, 2) have unlike numbers of parts"
    refused(graph, told)


def test_a_key_column_that_is_not_defined_is_refused_with_the_way_to_set_it():
    graph = Graph()
    graph.input("x").group("instance", 2).group("vertex", 2, name="again").stop()
    refused(graph, "'again': key column 'vertex' is not defined here", "by={'vertex': function}")


def test_rows_at_no_vertex_have_no_edges():
    graph = Graph(edge=())
    graph.input("x").group("instance", "size", how="sum").flatmap("edge", name="out").stop()
    refused(graph, "'out': rows are at no vertex here")


def test_weights_have_one_owner():
    shared = nn.Linear(4, 4)
    graph = Graph()
    x = graph.input("x").through(shared, name="one")
    x.through(nn.Sequential(shared), name="other").loss(none)
    refused(graph, "parameter '0.weight' of 'other' also belongs to 'one'", "one Part")
    both = nn.ModuleList([shared, nn.Sequential(shared)])
    part = Part(both)
    graph = Graph()
    x = graph.input("x").through(both[0], part=part, name="one")
    x.through(both[1], part=part, name="other").loss(none)
    graph.check(FLOATS)


def test_misuse_while_a_graph_is_written():
    graph = Graph(vertex=("kind",), edge=None)
    x = graph.input("x", step=0)
    cases = [
        (lambda: graph.input("x"), GraphError, "input 'x' is declared twice"),
        (lambda: graph.input("y", vertex=2), GraphError, "{'y': (rows, [2])}; and move()"),
        (lambda: Graph(vertex=("a", "a")), GraphError, "'a' is declared twice; columns"),
        (lambda: Graph(vertex=("size",)), GraphError, "'size' is what m.size gives"),
        (lambda: graph.input("y", lengths=0), GraphError, "'lengths' is what m.lengths gives"),
        (lambda: x.move(payload=0), GraphError, "'payload' is what m.payload gives"),
        (lambda: x.group(by={"size": 0}, size=1), GraphError, "'size' is what m.size gives"),
        (lambda: x.flatmap("source", count=len), GraphError, "'source' is what m.source gives"),
        (lambda: Graph(vertex="kind"), TypeError, "give a tuple of names"),
        (lambda: x.route(lambda m: m.kind, 0), ValueError, "route(ways=0): give 1 or more"),
        (lambda: x.move(), ValueError, "got no column"),
        (lambda: x.move(instance=0), GraphError, "'instance' cannot be changed"),
        (lambda: x.move(kind=0), GraphError, "'kind' is a column of instances"),
        (lambda: x.group("vertex", 0), ValueError, "group(size=0): give 1 member or more"),
        (lambda: x.group("vertex", 1, how="min"), ValueError, "how='min'): give one of stack"),
        (lambda: x.flatmap("edge"), GraphError, "instances have none: declare Graph(edge=())"),
        (lambda: x.flatmap("copy"), ValueError, "give count="),
        (lambda: x.split(), ValueError, "split(): give one size or more"),
        (lambda: x.split(2, 0), ValueError, "split(2, 0): give sizes of 1 or more"),
        (lambda: x.join(x), GraphError, "join() is for graph.loop()"),
        (lambda: graph.merge(), ValueError, "merge() got no stream"),
        (lambda: graph.concat(x), ValueError, "got 1 streams; two or more"),
        (lambda: graph.merge(Graph().input("y")), GraphError, "belongs to another graph"),
        (lambda: x.through(3), TypeError, "takes a module, a function or a Part, not int"),
        (lambda: x.stop(name="x"), GraphError, "for this one, or for the input that has it"),
    ]
    for act, kind, words in cases:
        with pytest.raises(kind, match=re.escape(words)):
            act()


def small() -> Graph:
    graph = Graph(vertex=("kind",))
    x = graph.input("x").through(nn.Linear(4, 2), name="map")
    yes, no = x.where(lambda m: m.kind > 0)
    yes.loss(none)
    graph.merge(no, x).output("out")
    return graph


def test_a_graph_prints_every_operator_and_where_its_rows_go():
    text = str(small())
    assert text.splitlines()[0] == "graph of 7 operators, 1 parts"
    assert re.search(r"2  map +through Linear \[auto\] +→ map broadcast", text)
    assert re.search(r"3  where +route +→ yes: loss, no: merge", text)
    assert re.search(r"7  map broadcast +broadcast +→ where, merge", text)


def test_a_long_reason_moves_no_other_line():
    graph = Graph(vertex=("column" * 40,))
    graph.input("x").through(nn.Linear(4, 2), name="map").loss(none, target="column" * 40)
    lines = str(graph).splitlines()
    assert len(lines[3]) > 200 and lines[1].index("→") < 100


def test_a_graph_draws_itself_as_mermaid_and_dot():
    graph = small()
    mermaid, dot = graph.mermaid(), graph.dot()
    assert mermaid.startswith("flowchart LR\n")
    assert '    n1(["x"])\n' in mermaid and "    n3 -->|yes| n4\n" in mermaid
    assert dot.startswith("digraph geartrain {\n") and dot.endswith("}\n")
    assert '    n3 -> n4 [label="yes"];\n' in dot
    assert '    n2 [label="map\\nLinear", shape=box];\n' in dot
    for text in (mermaid, dot):
        assert text.count("n7") == 1 + 1 + 2  # itself, one source, two readers


@pytest.mark.parametrize(
    ("module", "row", "words"),
    [
        (nn.Linear(4, 2), (), "each row is one number here: what an instance brings has rows"),
        (nn.Linear(5, 2), (4,), "it wants 5 features along the last axis"),
        (lambda x: None, (4,), "'node': a module returned NoneType"),
    ],
)
def test_rows_that_do_not_fit_are_told_with_what_would(module, row, words):
    graph = Graph()
    graph.input("x", shape=row, dtype=torch.float32).through(module, name="node").output()
    refused(graph, words)


ONE_ROW = [lambda m: m.label > 0, lambda m: m.payload[0][:, 0].item(), lambda m: float(m.label)]


@pytest.mark.parametrize("one", ONE_ROW)
@pytest.mark.parametrize("run", ["auto", "steps"])
def test_a_function_of_one_row_is_told_that_it_gets_columns(run, one):
    graph = Graph(value=("label",), run=run)
    rounds = graph.loop()
    rounds.join(graph.input("x", step=0))
    done, more = rounds.where(lambda m: m.step > 2)
    rounds.join(more.move(step=lambda m: m.step + 1 if one(m) else 3))
    done.through(nn.Linear(4, 2), name="readout").loss(gt.cross_entropy, target="label")
    data = [gt.Instance({"x": torch.randn(1, 4)}, value={"label": k % 2}) for k in range(8)]
    with pytest.raises(gt.GeartrainError, match="it gets columns of n rows, and gives one: np"):
        gt.Session(graph, runtime=gt.Threads(1, kernel_threads=1)).fit(data, epochs=1)
