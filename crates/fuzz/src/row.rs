//! A difference as text: the sequence that shows it, and a row of a test.

use std::fmt::Write as _;

use traffic_policy_testing::packet::render;

use crate::{action::Action, path::Path, run::Difference};

/// Returns the actions, the difference, the packet, and a test that repeats them.
pub fn describe(path: Path, actions: &[Action], difference: &Difference) -> String {
    let mut text = format!("{path:?}: after {} actions: {}\n", actions.len(), difference.what);
    if let Some((input, outcome, frame)) = &difference.packet {
        let _ = write!(
            text,
            "\nThe packet, at {:?} of {:?}:\n{}\nbecame ({outcome}):\n{}\n",
            input.hook,
            input.device,
            render(&input.frame),
            render(frame)
        );
    }
    let reason = difference.what.lines().next().unwrap_or_default();
    let _ = write!(text, "\nAs a row of tests/tests/reference.rs:\n\n    // {reason}\n    repeat(&[\n");
    for action in actions {
        let _ = writeln!(text, "        {},", source(*action));
    }
    text.push_str("    ]);\n");
    text
}

/// Returns an action as Rust source, with the names of its enums in scope.
fn source(action: Action) -> String {
    let debug = format!("Action::{action:?}");
    let names = [
        ("protocol: ", "protocol: Protocol::"),
        ("flags: ", "flags: Flags::"),
        ("chunk: ", "chunk: Chunk::"),
        ("tag: ", "tag: Tag::"),
        ("what: ", "what: Foreign::"),
        ("sender: ", "sender: Sender::"),
        ("damage: ", "damage: Damage::"),
        ("fault: ", "fault: Fault::"),
        ("change: ", "change: Change::"),
        ("point: ", "point: Point::"),
        ("sequence: ", "sequence: Number::"),
        ("acknowledgement: ", "acknowledgement: Number::"),
    ];
    names.iter().fold(debug, |text, (from, to)| text.replace(from, to))
}
