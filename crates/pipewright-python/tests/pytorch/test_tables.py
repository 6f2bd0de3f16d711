"""Tests of tables as text, and of tables that are not schedules. None needs PyTorch."""

import pytest
from pipewright_pp.torch import TableError, program_of, tables


def refused(table, message, rank=None, position=None):
    """Checks the error for a value that is not a table."""
    with pytest.raises(TableError, match=message) as error:
        program_of(table)
    assert (error.value.rank, error.value.position) == (rank, position)


def test_values_that_are_not_tables_are_refused():
    refused(None, "the table is of type NoneType; a row of actions for each rank was expected")
    refused("0F0,0B0", "the table is of type str")
    refused({}, "the table is empty")
    refused({0: ["0F0", "0B0"], 2: ["1F0"]}, r"rows for the ranks \[0, 2\]; a row for each of 2 ranks from 0 was expected")
    refused([["0F0"], "1F0"], "row 1 of the table is '1F0'; a sequence of actions was expected", rank=1)


def test_entries_that_are_not_actions_are_located():
    refused([["0F0", "0X"], ["1F0"]], "X", None, None)
    refused([["0F0"], ["1F0", 7]], r"rank 1, position 1: read 7; an action such as 2F0", rank=1, position=1)
    refused([["0F0", "forward"]], "rank 0, position 1: read 'forward'", rank=0, position=1)
    refused([["0F0", ["0B0"]]], "rank 0, position 1: read \\['0B0'\\]", rank=0, position=1)


def test_actions_that_are_not_a_schedule_are_refused():
    refused([["0B0", "0F0"], ["1F0", "1B0"]], "the actions of the table do not form a schedule")
    refused([["0F0", "0B0"], ["0F1", "0B1"]], "the actions of the table do not form a schedule")


def test_a_table_of_computations_gets_messages():
    program = program_of({0: ["0F0", None, "0B0"], 1: [None, "1F0", "1B0"]})
    assert program.csv() == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    program.validate()


def test_a_table_with_messages_is_read_as_it_is():
    rows = [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    assert program_of(rows).rows == rows


def test_a_reduction_without_a_wait_gets_one():
    program = program_of([["0F0", "0B0", "0REDUCE_GRAD"]])
    assert program.rows == [["0F0", "0B0", "0REDUCE_GRAD", "0WAIT_REDUCE_GRAD"]]


def test_waits_are_removed_for_versions_that_do_not_know_them():
    rows = [["0F0", "0SEND_F0", "0B0", "0WAIT_SEND_F0", "0REDUCE_GRAD", "0WAIT_REDUCE_GRAD"]]
    assert tables.without_waits(rows) == [["0F0", "0SEND_F0", "0B0", "0REDUCE_GRAD"]]


def test_sends_without_a_wait_are_found():
    rows = [["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0WAIT_SEND_F1"], ["1SEND_B0"]]
    assert tables.unwaited_sends(rows) == ["0SEND_F0", "1SEND_B0"]


def test_actions_that_move_tensors_out_of_memory_are_found():
    rows = [["0F0", "0OFFLOAD0", "0F1", "0RELOAD0", "0B1", "0B0"], ["1F0", "1B0"]]
    assert tables.offloads(rows) == ["0OFFLOAD0", "0RELOAD0"]
