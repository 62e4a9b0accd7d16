"""The shape of the code: what `benchmarks.codebase` counts does not grow back, and no name means two things."""

import ast
from collections import defaultdict

from benchmarks import codebase


def test_no_class_and_no_module_is_too_large_to_read():
    assert codebase.largest_class()[0] <= 300
    assert codebase.largest_module()[0] <= 600


def test_few_functions_take_many_parameters():
    found = codebase.long_parameter_lists()
    assert len(found) <= 15, found


def test_private_members_stay_private():
    """The rest switches torch's compiler, and finds hooks of parameters, for which torch has no public names."""
    found = codebase.private_uses()
    assert len(found) <= 3, found


def test_the_path_of_a_round_stays_short():
    before, during = (codebase.federation(codebase.lines_of(called)) for called in codebase.traced_round())
    assert len(during) <= 12 and sum(during.values()) <= 850, during
    assert len(before) <= 9 and sum(before.values()) <= 215, before


def test_no_file_or_class_name_is_used_for_two_things():
    files, classes = defaultdict(list), defaultdict(list)
    for name, tree, _ in codebase.modules():
        stem = name.rpartition("/")[2]
        if stem != "__init__.py":
            files[stem].append(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    assert {name: places for name, places in {**files, **classes}.items() if len(places) > 1} == {}
