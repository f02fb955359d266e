"""What ranks write comes out whole: no mixed lines, no lost bytes."""

import asyncio
import io
import os
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.script.output import FileOutput, PipeReader, Screen, Speaker, split_lines

ZERO, ONE = Speaker("rank 0", "stdout"), Speaker("rank 1", "stdout")


def new_sink(*, colour: bool = False) -> tuple[Screen, Callable[[], bytes]]:
    stream = io.BytesIO()
    return Screen(stream, colour=colour), stream.getvalue


@given(st.binary(max_size=200))
def test_cutting_loses_nothing(data: bytes) -> None:
    assert b"".join(split_lines(data)) == data


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"\xff\x00"]), max_size=30))
def test_cut_pieces_are_single_lines(parts: list[bytes]) -> None:
    *lines, rest = split_lines(b"".join(parts))
    for line in lines:
        assert b"\n" not in line[:-1]
        assert b"\r" not in line[1:].removesuffix(b"\r\n")
    assert b"\n" not in rest


def test_an_unfinished_line_is_ended_before_another_rank_writes() -> None:
    screen, written = new_sink()
    screen.write(ZERO, b"half")
    screen.write(ONE, b"whole\n")
    screen.write(ZERO, b"rest\n")
    assert written() == b"[rank 0] half\n[rank 1] whole\n[rank 0] rest\n"


def test_an_unfinished_line_goes_on_where_it_stopped() -> None:
    screen, written = new_sink()
    screen.write(ZERO, b"loading")
    screen.write(ZERO, b"...done\n")
    assert written() == b"[rank 0] loading...done\n"


def test_the_two_streams_of_a_rank_do_not_mix_inside_a_line() -> None:
    screen, written = new_sink()
    screen.write(ZERO, b"out")
    screen.write(Speaker("rank 0", "stderr"), b"err\n")
    assert written() == b"[rank 0] out\n[rank 0] err\n"


def test_a_progress_bar_keeps_its_prefix() -> None:
    screen, written = new_sink()
    for piece in (b"\r 1%", b"\r 2%", b"\n"):
        screen.write(ZERO, piece)
    assert written() == b"[rank 0]  1%\r[rank 0]  2%\n"


def test_ranks_have_colours_and_the_text_is_plain() -> None:
    screen, written = new_sink(colour=True)
    screen.write(ZERO, b"a\n")
    screen.write(ONE, b"a\n")
    first, second = written().splitlines()
    assert first.endswith(b"[rank 0]\x1b[0m a")
    assert second.endswith(b"[rank 1]\x1b[0m a")
    assert first[:5] != second[:5]


def test_a_reader_that_went_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as stream:
        screen = Screen(stream, colour=False)
        screen.write(ZERO, b"nobody reads this\n")
        screen.write(ZERO, b"nor this\n")


def pump(*chunks: bytes, hold_open: bool = False) -> tuple[bytes, bytes]:
    """What a screen gets, and the tail, when a rank writes `chunks` and ends."""

    async def feed() -> bytes:
        read, write = os.pipe()
        source = PipeReader(ZERO, read, screen)
        for chunk in chunks:
            os.write(write, chunk)
            await asyncio.sleep(0)
        if not hold_open:
            os.close(write)
        source.close()
        if hold_open:
            os.close(write)
        return source.tail()

    screen, written = new_sink()
    tail = asyncio.run(feed())
    return written(), tail


def test_text_and_newline_in_two_writes_are_one_line() -> None:
    assert pump(b"one", b"\n", b"two", b"\n")[0] == b"[rank 0] one\n[rank 0] two\n"


def test_a_last_line_without_newline_gets_one() -> None:
    assert pump(b"one\ntwo")[0] == b"[rank 0] one\n[rank 0] two\n"


def test_a_pipe_that_a_grandchild_holds_open_does_not_block() -> None:
    assert pump(b"last words", hold_open=True)[0] == b"[rank 0] last words\n"


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\r", b"")))
def test_any_bytes_come_through(data: bytes) -> None:
    written, tail = pump(data)
    lines = written.split(b"\n")[:-1]
    assert all(line.startswith(b"[rank 0] ") for line in lines)
    assert b"\n".join(line.removeprefix(b"[rank 0] ") for line in lines) == data.removesuffix(b"\n")
    assert tail == data


def test_an_unfinished_line_appears_though_the_rank_goes_on() -> None:
    async def prompt() -> bytes:
        read, write = os.pipe()
        source = PipeReader(ZERO, read, screen)
        os.write(write, b"password: ")
        async with asyncio.timeout(10):
            while not written():
                await asyncio.sleep(0.01)
        shown = written()
        os.close(write)
        source.close()
        return shown

    screen, written = new_sink()
    assert asyncio.run(prompt()) == b"[rank 0] password: "


def test_a_log_file_takes_both_streams_in_order(tmp_path) -> None:
    output = FileOutput(tmp_path / "rank-0.log")
    out, err = output.fds
    os.write(out, b"one\n")
    os.write(err, b"two\n")
    output.started()
    assert (tmp_path / "rank-0.log").read_bytes() == b"one\ntwo\n" == output.tail()
