//! A terminal emulator that can cut off long lines instead of wrapping them (`ESC [ ? 7 l`), which `vt100` alone does not.

/// The escape sequences that turn wrapping off and on.
const CUT: &[u8] = b"\x1b[?7l";
const WRAP: &[u8] = b"\x1b[?7h";

/// The emulator, and its place in the output.
pub(crate) struct Emulator {
    parser: vt100::Parser,
    cuts_lines: bool,
    /// The escape sequence that has begun and has not ended.
    sequence: Vec<u8>,
}

impl Emulator {
    pub(crate) fn new(rows: u16, columns: u16) -> Self {
        Self { parser: vt100::Parser::new(rows, columns, 0), cuts_lines: false, sequence: Vec::new() }
    }

    pub(crate) fn resize(&mut self, rows: u16, columns: u16) {
        self.parser.screen_mut().set_size(rows, columns);
    }

    pub(crate) fn screen(&self) -> &vt100::Screen {
        self.parser.screen()
    }

    pub(crate) fn process(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.cuts_lines && self.begins_character(byte) {
                self.stay_in_line();
            }
            self.parser.process(&[byte]);
            self.follow(byte);
        }
    }

    /// Returns whether `byte` is the first one of a character that is shown.
    fn begins_character(&self, byte: u8) -> bool {
        self.sequence.is_empty() && byte >= b' ' && !(0x80..0xc0).contains(&byte)
    }

    /// Lets the next character replace the last one of a full line.
    fn stay_in_line(&mut self) {
        let columns = self.parser.screen().size().1;
        if self.parser.screen().cursor_position().1 >= columns {
            self.parser.process(format!("\x1b[{columns}G").as_bytes());
        }
    }

    /// Follows the escape sequences.
    fn follow(&mut self, byte: u8) {
        if self.sequence.is_empty() && byte != b'\x1b' {
            return;
        }
        self.sequence.push(byte);
        let is_over = match self.sequence[..] {
            [_] => false,
            [_, b'['] => false,
            [_, b'[', ..] => (0x40..0x7f).contains(&byte),
            _ => true,
        };
        if is_over {
            match self.sequence.as_slice() {
                CUT => self.cuts_lines = true,
                WRAP => self.cuts_lines = false,
                _ => {}
            }
            self.sequence.clear();
        }
    }
}

#[test]
fn long_lines_are_cut_while_wrapping_is_off() {
    let mut emulator = Emulator::new(4, 5);
    emulator.process("abcdefg\r\n\x1b[?7labcdé\x1b[1mfg\x1b[0m\r\nh\x1b[?7h".as_bytes());
    assert_eq!(emulator.screen().contents(), "abcdefg\nabcdg\nh");
}
