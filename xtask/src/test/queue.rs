//! The queue runs a number of jobs at a time, and prints the output of each when it has ended.

use std::{
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{
    cost::{Cost, test_name},
    plan::{Company, Job},
    processors::Processors,
};
use crate::tally::Tally;

/// The time after which a running job is named, so that one sees which one hangs.
const LONG: Duration = Duration::from_secs(120);
/// The longest time between two looks of the queue at the running jobs.
const LOOK: Duration = Duration::from_secs(1);
/// The share of idle time above which another test has room: of two processors, it would have half
/// of one.
const ROOM: f64 = 0.25;
/// The same for a test that measures loss: of two processors, it would have one.
const MOSTLY_IDLE: f64 = 0.5;

/// The numbers of jobs that run at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    /// The number while the processors are busy.
    pub(super) always: usize,
    /// The number while they are idle.
    pub(super) most: usize,
    /// The number of jobs with little company, while the processors are mostly idle.
    pub(super) few: usize,
}

impl Slots {
    /// Returns the number of jobs that always run at once, the largest number, and the share of
    /// idle time above which there are more than the former.
    fn of(self, company: Company) -> (usize, usize, f64) {
        match company {
            Company::Alone => (1, 1, 1.0),
            Company::Few => (1, self.few, MOSTLY_IDLE),
            Company::Any => (self.always, self.most, ROOM),
        }
    }
}

/// Runs the jobs in their order, as many at a time as there are slots for a job with their company.
/// Returns whether all passed.
pub(super) fn run(jobs: &[Job<'_>], slots: Slots, variables: &[(&str, PathBuf)], tally: &mut Tally) -> bool {
    let before = tally.failed;
    thread::scope(|scope| {
        let (send, ended) = mpsc::channel();
        let mut waiting = jobs.iter().enumerate().peekable();
        // Each is a job's number, its start, and whether it was named because it takes long.
        let mut running: Vec<(usize, Instant, bool)> = Vec::new();
        let mut processors = Processors::look();
        loop {
            while let Some((_, job)) = waiting.peek() {
                // Jobs of two kinds do not run at the same time.
                let alike = running.iter().all(|(number, ..)| jobs[*number].company == job.company);
                let (always, most, idle) = slots.of(if alike { job.company } else { Company::Alone });
                if running.len() >= always && (running.len() >= most || !processors.idle(idle)) {
                    break;
                }
                let Some((number, job)) = waiting.next() else { break };
                running.push((number, Instant::now(), false));
                let send = send.clone();
                scope.spawn(move || send.send((number, Ran::of(job, variables))));
            }
            if running.is_empty() {
                break;
            }
            match ended.recv_timeout(LOOK) {
                Ok((number, ran)) => {
                    running.retain(|(other, ..)| *other != number);
                    ran.conclude(&jobs[number], tally);
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The channel stays open as long as `send` exists.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            for (number, started, said) in &mut running {
                if !*said && started.elapsed() > LONG {
                    *said = true;
                    let Job { program, tests, .. } = &jobs[*number];
                    println!("{} has been running for {LONG:?}: {}", program.suite, tests.join(" "));
                }
            }
        }
    });
    tally.failed == before
}

/// The lines of a process that has ended, with the times at which they came.
struct Ran {
    output: Vec<(Instant, String)>,
    errors: Vec<(Instant, String)>,
    started: Instant,
    /// The reason why the process failed, if it did.
    wrong: Option<String>,
}

impl Ran {
    fn of(job: &Job<'_>, variables: &[(&str, PathBuf)]) -> Self {
        let mut ran = Self { output: Vec::new(), errors: Vec::new(), started: Instant::now(), wrong: None };
        if let Err(error) = ran.follow(job, variables) {
            ran.wrong = Some(format!("{error:#}"));
        }
        ran
    }

    fn follow(&mut self, job: &Job<'_>, variables: &[(&str, PathBuf)]) -> Result<()> {
        let mut command = job.program.command(&job.tests, variables)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child: Child = command.spawn().context("the test program cannot be started")?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        thread::scope(|scope| {
            let errors = scope.spawn(|| lines(errors));
            self.output = lines(output);
            self.errors = errors.join().unwrap_or_default();
        });
        let status = child.wait().context("waiting for the tests failed")?;
        self.wrong = (!status.success()).then(|| format!("the test program ended with {status}"));
        Ok(())
    }

    /// Counts the job's tests and prints their results, and, if the job failed, all of its output.
    fn conclude(self, job: &Job<'_>, tally: &mut Tally) {
        let Self { output, errors, started, wrong } = self;
        let suite = &job.program.suite;
        let mut own = Tally::default();
        let mut before = started;
        let mut text = String::new();
        for (at, line) in &output {
            own.note(line);
            let Some((name, word)) = result(line) else { continue };
            let took = at.duration_since(before);
            before = *at;
            if word != "ignored" {
                text +=
                    &format!("test {} ... {word} ({:.1} s)\n", test_name(suite, name), took.as_secs_f32());
                let (suite, test) = (suite.clone(), name.to_owned());
                own.costs.push(Cost { suite, test, took, passed: word == "ok" });
            }
        }
        errors.iter().for_each(|(_, line)| own.note(line));
        let missing = job.tests.iter().filter(|test| {
            !output.iter().any(|(_, line)| result(line).is_some_and(|(name, _)| name == *test))
        });
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if own.failed == 0 && (wrong.is_some() || !missing.is_empty()) {
            // The process was killed or could not be started, or does not know a test that it has
            // listed.
            own.failed += 1;
            let wrong = wrong.as_deref().unwrap_or("no result");
            own.failures.push(format!("{}: {wrong}", missing.first().unwrap_or(&"after its tests")));
        }
        own.failures.iter_mut().for_each(|name| *name = test_name(suite, name));
        let said = output.iter().filter(|_| own.failed > 0).chain(&errors);
        said.for_each(|(_, line)| text += &format!("{line}\n"));
        print!("{text}");
        tally.add(own);
    }
}

fn lines(from: Option<impl Read>) -> Vec<(Instant, String)> {
    let Some(from) = from else { return Vec::new() };
    let mut reader = BufReader::new(from);
    let mut lines = Vec::new();
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        lines.push((Instant::now(), String::from_utf8_lossy(&line).trim_end().to_owned()));
        line.clear();
    }
    lines
}

/// Parses the name and the result of a test from a line of the harness: `test a::b - should panic
/// ... ok`, `test a ... ignored, why`.
fn result(line: &str) -> Option<(&str, &str)> {
    let (name, word) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let word = word.split(',').next().unwrap_or(word);
    let known = ["ok", "FAILED", "ignored"].contains(&word);
    known.then(|| (name.strip_suffix(" - should panic").unwrap_or(name), word))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::test::program::Program;

    /// Runs jobs of a stand-in. Returns what was counted, and the largest number of tests that ran
    /// at the same time.
    fn run_all(name: &str, jobs: &[(&[&str], Company)], slots: usize) -> (Tally, usize) {
        let slots = Slots { always: slots, most: slots, few: slots };
        let folder = std::env::temp_dir().join(format!("xtask-queue-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = Program::stand_in(&folder);
        let job = |(tests, company): &(&[&str], Company)| {
            let mut job = Job::new(&program, *company);
            job.tests = tests.iter().map(ToString::to_string).collect();
            job
        };
        let jobs: Vec<Job<'_>> = jobs.iter().map(job).collect();
        let mut tally = Tally::default();
        let passed = run(&jobs, slots, &[], &mut tally);
        assert_eq!(passed, tally.failed == 0);
        let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
        let (mut now, mut most) = (0, 0);
        for line in log.lines() {
            now = if line == "begin" { now + 1 } else { now - 1 };
            most = most.max(now);
        }
        fs::remove_dir_all(folder).unwrap();
        (tally, most)
    }

    #[test]
    fn results_are_counted_by_suite_and_test() {
        let (tally, _) = run_all(
            "results",
            &[(&["a", "b"], Company::Any), (&["fails"], Company::Any), (&["skips"], Company::Any)],
            2,
        );
        assert_eq!(tally.to_string(), "2 passed, 1 failed, 1 skipped");
        assert_eq!(tally.failures, ["stand-in::fails"]);
        let mut names: Vec<_> = tally.costs.iter().map(|cost| (cost.test.as_str(), cost.passed)).collect();
        names.sort_unstable();
        assert_eq!(names, [("a", true), ("b", true), ("fails", false), ("skips", true)]);
    }

    #[test]
    fn a_process_that_dies_has_failed() {
        let (tally, _) = run_all("dies", &[(&["a", "dies", "b"], Company::Any)], 2);
        assert_eq!(tally.failed, 1);
        assert!(tally.failures[0].starts_with("stand-in::dies: the test program ended with "), "{tally:?}");
    }

    #[test]
    fn a_test_without_a_result_has_failed() {
        let (tally, _) = run_all("missing", &[(&["a", "is_missing"], Company::Any)], 2);
        assert_eq!((tally.passed, tally.failed), (1, 1));
        assert_eq!(tally.failures, ["stand-in::is_missing: no result"]);
    }

    #[test]
    fn as_many_at_once_as_there_are_slots() {
        let jobs: [(&[&str], Company); 5] = [(&["sleeps"], Company::Any); 5];
        let (tally, most) = run_all("slots", &jobs, 2);
        assert_eq!((tally.passed, most), (5, 2));
    }

    #[test]
    fn nothing_runs_beside_a_job_that_runs_alone_or_with_few() {
        let test: &[&str] = &["sleeps"];
        let jobs =
            [Company::Alone, Company::Alone, Company::Few, Company::Any].map(|company| (test, company));
        let (tally, most) = run_all("alone", &jobs, 3);
        assert_eq!((tally.passed, most), (4, 1));
    }

    #[test]
    fn lines_of_the_harness() {
        assert_eq!(result("test a::b ... ok"), Some(("a::b", "ok")));
        assert_eq!(result("test a - should panic ... ok"), Some(("a", "ok")));
        assert_eq!(result("test a ... ignored, started by b"), Some(("a", "ignored")));
        assert_eq!(result("test result: ok. 1 passed"), None);
        assert_eq!(result("test a has been running for over 60 seconds"), None);
    }
}
