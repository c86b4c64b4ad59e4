//! A view on a terminal by plain escape sequences, on the alternate screen. Dropping it restores
//! the terminal.

use std::io::{self, Write as _};

use terminal_size::{Height, Width, terminal_size_of};

/// The maximum width, in columns.
const COLUMNS: usize = 80;

/// The sequence that enters the alternate screen and hides the cursor; the next one leaves it.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

pub(super) struct Screen(());

impl Screen {
    /// Opens the screen on standard output, which must be a terminal.
    pub(super) fn enter() -> io::Result<Self> {
        let screen = Self(());
        let mut out = io::stdout().lock();
        out.write_all(ENTER.as_bytes())?;
        out.flush()?;
        Ok(screen)
    }

    /// Returns the number of columns in use, and of rows.
    pub(super) fn size(&self) -> (usize, usize) {
        match terminal_size_of(io::stdout()) {
            Some((Width(columns), Height(rows))) if columns > 0 && rows > 0 => {
                (usize::from(columns).min(COLUMNS), rows.into())
            }
            _ => (COLUMNS, 24),
        }
    }

    /// Draws over the previous content. Lines that are too long or too many are cut off.
    pub(super) fn draw(&mut self, lines: &[String]) -> io::Result<()> {
        let (columns, rows) = self.size();
        let mut text = String::from("\x1b[H");
        for (at, line) in lines.iter().take(rows).enumerate() {
            if at > 0 {
                text.push_str("\r\n");
            }
            // Names come from objects, and must not control the terminal.
            text.extend(line.chars().map(|c| if c.is_control() { '?' } else { c }).take(columns));
            text.push_str("\x1b[K");
        }
        text.push_str("\x1b[J");
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut out = io::stdout().lock();
        // If the terminal is gone, nothing needs to be restored.
        let _ = out.write_all(LEAVE.as_bytes()).and_then(|()| out.flush());
    }
}
