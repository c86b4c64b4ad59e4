//! Common parts of commands that print: the format flag, tables, time spans, names.

use std::{
    io::{self, BufWriter, Write},
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::model::{FrontendKind, Policy, ServicePortKey};

/// Argument for the output format.
#[derive(Debug, Args)]
pub struct OutputArguments {
    /// Output format.
    #[arg(long, env = "TRAFFIC_POLICY_OUTPUT", default_value = "table", value_name = "FORMAT")]
    pub output: Output,
}

/// An output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// Human-readable.
    Table,
    Json,
}

/// Prints with `write`. A reader that closes the pipe early (`| head`) is not an error.
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Whether an error is a broken pipe on output: its reader has gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref().map(io::Error::kind));
    kinds.any(|kind| kind == io::ErrorKind::BrokenPipe)
}

/// Prints a JSON document.
pub fn print_json(document: &impl Serialize) -> Result<()> {
    print(|out| {
        serde_json::to_writer_pretty(&mut *out, document)?;
        writeln!(out)
    })
}

/// Returns an error for an invalid argument: exit code 2, as for those that clap itself rejects.
pub fn usage(message: &str) -> clap::Error {
    clap::Error::raw(clap::error::ErrorKind::ValueValidation, format!("{message}\n"))
}

/// Writes rows below a header. Columns of numbers are right-aligned.
pub fn table<const N: usize, T>(
    out: &mut dyn Write,
    header: [&str; N],
    rows: &[T],
    cells: impl Fn(&T) -> [String; N],
) -> io::Result<()> {
    let mut widths = header.map(|name| name.chars().count());
    let mut numbers = [true; N];
    for row in rows {
        for (column, cell) in cells(row).iter().enumerate() {
            widths[column] = widths[column].max(cell.chars().count());
            numbers[column] &= cell.is_empty()
                || cell.starts_with(|c: char| c.is_ascii_digit())
                    && cell.ends_with(|c: char| c.is_ascii_digit() || c == '%')
                    && !cell.contains([':', '/']);
        }
    }
    let mut line = |cells: &[&str]| {
        let mut text = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let width = widths[column];
            text += &if numbers[column] { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&header)?;
    for row in rows {
        let cells = cells(row);
        line(&cells.each_ref().map(String::as_str))?;
    }
    Ok(())
}

/// Wraps a text into lines of at most `width` characters; a longer word gets a line of its own.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines
            .last_mut()
            .filter(|line| line.is_empty() || line.chars().count() + 1 + word.chars().count() <= width);
        match last {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Formats a time span for people: two units at most.
pub fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 if time.subsec_millis() == 0 || seconds >= 10 => format!("{seconds}s"),
        0..60 => format!("{:.1}s", time.as_secs_f64()),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// Whether a name typed by a person, `NAME` or `NAMESPACE/NAME`, matches a Service.
pub fn is_named(key: &ServicePortKey, name: &str) -> bool {
    match name.split_once('/') {
        Some((namespace, name)) => key.service.namespace == namespace && key.service.name == name,
        None => key.service.name == name,
    }
}

/// The name of a policy in the API.
pub const fn policy(policy: Policy) -> &'static str {
    match policy {
        Policy::Cluster => "Cluster",
        Policy::Local => "Local",
    }
}

/// The name of a kind of frontend, after the Service type or field that creates it.
pub const fn frontend_kind(kind: FrontendKind) -> &'static str {
    match kind {
        FrontendKind::ClusterIp => "ClusterIP",
        FrontendKind::NodePort => "NodePort",
        FrontendKind::LoadBalancer => "LoadBalancer",
        FrontendKind::ExternalIp => "ExternalIP",
        FrontendKind::LoopbackNodePort => "NodePort (loopback)",
        FrontendKind::OpenedNodePort => "NodePort (forwarded directly)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Protocol, ServiceName};

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut out = Vec::new();
        let rows = [("eth0", 5), ("a-long-name", 12_000)];
        table(&mut out, ["DEVICE", "PACKETS"], &rows, |(name, packets)| {
            [(*name).to_owned(), packets.to_string()]
        })
        .unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "DEVICE       PACKETS\neth0               5\na-long-name    12000\n"
        );
    }

    #[test]
    fn spans() {
        for (milliseconds, text) in [
            (0, "0s"),
            (1_500, "1.5s"),
            (59_999, "59s"),
            (200_000, "3m20s"),
            (3_660_000, "1h01m"),
            (90_000_000, "1d01h"),
        ] {
            assert_eq!(span(Duration::from_millis(milliseconds)), text);
        }
    }

    #[test]
    fn services_by_name() {
        let key = ServicePortKey {
            service: ServiceName { namespace: "shop".to_owned(), name: "web".to_owned() },
            port: "http".to_owned(),
            protocol: Protocol::Tcp,
            ipv6: false,
        };
        assert_eq!(key.to_string(), "shop/web:http");
        assert_eq!(ServicePortKey { port: String::new(), ..key.clone() }.to_string(), "shop/web");
        assert!(is_named(&key, "web") && is_named(&key, "shop/web"));
        assert!(!is_named(&key, "shop") && !is_named(&key, "other/web") && !is_named(&key, "we"));
    }
}
