//! The assignment of tests to processes, the order of these, and the tests that have the machine,
//! or half of it, for themselves.

use super::{
    cost::{Known, test_name},
    program::Program,
};

/// The suites, modules or single tests that measure time against a bound, or loss while they fill
/// all processors themselves.
const ALONE: [&str; 7] = [
    "lab::remains::a_lab_comes_up_fast_and_goes_completely",
    "loss::crowd",
    "loss::flood",
    "loss::outlive::many",
    "observe::outside::an_outside_bench_sees_the_same_ratio",
    "sockets::cost::of_connect",
    "speed",
];
/// The suites, and modules of others, that measure loss: a machine that is busy with other tests
/// looks to them like a network that loses packets. They leave three quarters of two processors
/// idle.
const FEW: [&str; 3] = ["loss", "policy::direct::changes", "policy::fallback"];
/// Tests of these suites that measure neither: they wait most of their time, and run beside others.
const NOT_ALONE: [&str; 6] = [
    "loss::direct::dispatch::by_mac_address_once_all_nodes_have_heard",
    "loss::direct::a_node_says_why_it_opens_nothing",
    "loss::direct::nodes_without_room_fail_no_write",
    "loss::writes::a_restart_writes_nothing_tc",
    "loss::writes::a_restart_writes_nothing_xdp",
    "loss::writes::one_service_changes_and_only_that_one_is_written",
];
/// The suites of which one process loads or computes something for all of its tests. Each is
/// divided among few processes, as unit tests are, most of which take less time than a process.
const TOGETHER: [&str; 2] = ["budgets", "packets"];
/// The assumed time of a test that no earlier run has timed.
const SECONDS: f64 = 10.0;
/// The same for a test that shares its process with others.
const SECONDS_TOGETHER: f64 = 0.5;
/// The number of tests that are worth a process of their own.
const SHARE: usize = 40;

/// The jobs that may run at the same time as a job. The jobs with the least company come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Company {
    /// None.
    Alone,
    /// Others of this kind, while the processors are mostly idle.
    Few,
    /// All but the former.
    Any,
}

/// One process with tests of one program.
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    pub(super) program: &'a Program,
    pub(super) tests: Vec<String>,
    pub(super) company: Company,
    seconds: f64,
}

impl<'a> Job<'a> {
    pub(super) fn new(program: &'a Program, company: Company) -> Self {
        Self { program, tests: Vec::new(), company, seconds: 0.0 }
    }
}

/// Returns the jobs of these tests: those with the least company first, and of these the longest,
/// so that none begins late and keeps one processor busy at the end.
pub(super) fn jobs<'a>(tests: &'a [(Program, Vec<String>)], known: &Known) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for (program, tests) in tests {
        let suite = program.suite.as_str();
        let together = program.unit || TOGETHER.contains(&suite);
        let otherwise = if together { SECONDS_TOGETHER } else { SECONDS };
        let processes = if together { tests.len().div_ceil(SHARE) } else { tests.len() };
        let mut timed: Vec<(f64, &String)> = tests
            .iter()
            .map(|test| (known.seconds(&test_name(suite, test)).unwrap_or(otherwise), test))
            .collect();
        timed.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut own: Vec<Job<'a>> = (0..processes).map(|_| Job::new(program, Company::Any)).collect();
        for (seconds, test) in timed {
            // The processes of a suite take about as long as each other. None is left without a
            // test, because a test program that is given no name runs all that it has.
            let less = |a: &&mut Job<'_>, b: &&mut Job<'_>| {
                a.seconds.total_cmp(&b.seconds).then(a.tests.len().cmp(&b.tests.len()))
            };
            let Some(job) = own.iter_mut().min_by(less) else { break };
            job.seconds += seconds;
            job.company = job.company.min(company(suite, &test_name(suite, test)));
            job.tests.push(test.clone());
        }
        jobs.extend(own);
    }
    jobs.sort_by(|a, b| a.company.cmp(&b.company).then(b.seconds.total_cmp(&a.seconds)));
    jobs
}

/// Returns the company of a test `SUITE::MODULE::TEST`.
fn company(suite: &str, name: &str) -> Company {
    let module = name.rsplit_once("::").map_or(suite, |(module, _)| module);
    let is_in = |list: &[&str]| [suite, module, name].iter().any(|part| list.contains(part));
    if NOT_ALONE.contains(&name) {
        Company::Any
    } else if is_in(&ALONE) {
        Company::Alone
    } else if is_in(&FEW) {
        Company::Few
    } else {
        Company::Any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(tests: &[(&str, usize)], known: &Known) -> Vec<(String, Vec<String>, Company)> {
        let of = |number: usize| (0..number).map(|number| format!("t{number}")).collect();
        let tests: Vec<_> =
            tests.iter().map(|(suite, number)| (Program::named(suite), of(*number))).collect();
        let jobs = jobs(&tests, known);
        jobs.into_iter().map(|job| (job.program.suite.clone(), job.tests, job.company)).collect()
    }

    #[test]
    fn those_with_the_least_company_first_and_of_these_the_longest() {
        let known =
            Known::of(&[("policy::t0", 3.0), ("policy::t1", 50.0), ("loss::t0", 9.0), ("speed::t0", 2.0)]);
        let jobs = planned(&[("loss", 1), ("policy", 3), ("speed", 1)], &known);
        let names: Vec<_> =
            jobs.iter().map(|(suite, tests, company)| (suite.as_str(), &*tests[0], *company)).collect();
        let expected = [
            ("speed", "t0", Company::Alone),
            ("loss", "t0", Company::Few),
            ("policy", "t1", Company::Any),
            // No earlier run has timed it.
            ("policy", "t2", Company::Any),
            ("policy", "t0", Company::Any),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn processes_of_a_suite_take_about_as_long_as_each_other() {
        let known = Known::of(&[("packets::t7", 20.0), ("packets::t8", 10.0)]);
        let jobs = planned(&[("packets", 45)], &known);
        // 43 tests of half a second, and two of known times.
        let numbers: Vec<usize> = jobs.iter().map(|(_, tests, _)| tests.len()).collect();
        assert_eq!(numbers.iter().sum::<usize>(), 45);
        let with = |test: &str| jobs.iter().position(|(_, tests, _)| tests.iter().any(|name| name == test));
        assert_ne!(with("t7"), with("t8"));
        assert!(jobs[with("t7").unwrap()].1.len() < jobs[with("t8").unwrap()].1.len(), "{numbers:?}");
    }

    #[test]
    fn the_company_of_a_test_is_that_of_its_suite_module_or_name() {
        let of_loss = |name| company("loss", name);
        assert_eq!(of_loss("loss::restart::tc_ipv4"), Company::Few);
        assert_eq!(of_loss("loss::flood::tc_ipv4"), Company::Alone);
        assert_eq!(of_loss(NOT_ALONE[0]), Company::Any);
        assert_eq!(company("sockets", "sockets::cost::of_connect"), Company::Alone);
        assert_eq!(company("sockets", "sockets::cost::of_sendmsg"), Company::Any);
        assert_eq!(company("policy", "policy::t0"), Company::Any);
    }

    /// A test that was renamed would run beside others, or alone.
    #[test]
    fn tests_with_a_company_of_their_own_exist() {
        let is_module = |path: std::path::PathBuf| path.is_dir() || path.with_extension("rs").exists();
        for name in ALONE.into_iter().chain(FEW).chain(NOT_ALONE) {
            let words: Vec<&str> = name.split("::").collect();
            let (last, modules) = words.split_last().unwrap();
            assert!(!TOGETHER.contains(&words[0]));
            let exists = |suites: &str| {
                let suites = crate::cargo::root().join(suites);
                let folder = modules.iter().fold(suites, |folder, module| folder.join(module));
                let is_test = || {
                    let source = std::fs::read_to_string(folder.with_extension("rs")).unwrap_or_default();
                    source.contains(&format!("fn {last}()"))
                };
                is_module(folder.join(last)) || is_test()
            };
            assert!(crate::cargo::SUITES.into_iter().any(exists), "{name}");
        }
        for suite in TOGETHER {
            let folders = crate::cargo::SUITES.map(|suites| crate::cargo::root().join(suites).join(suite));
            assert!(folders.into_iter().any(is_module), "{suite}");
        }
    }

    #[test]
    fn each_test_is_in_one_process() {
        // The file of times has two decimals: shorter times are read as zero.
        let known = Known::of(&[("policy::t1", 0.0), ("policy::t2", 0.0), ("policy::t3", 0.0)]);
        let jobs = planned(&[("packets", 200), ("budgets", 5), ("policy", 4)], &known);
        assert!(jobs.iter().all(|(_, tests, _)| !tests.is_empty()), "{jobs:?}");
        for (suite, number, processes) in [("packets", 200, 5), ("budgets", 5, 1), ("policy", 4, 4)] {
            let of = jobs.iter().filter(|(name, ..)| name == suite);
            assert_eq!(of.clone().count(), processes, "{suite}");
            let mut tests: Vec<_> = of.flat_map(|(_, tests, _)| tests).collect();
            tests.sort();
            tests.dedup();
            assert_eq!(tests.len(), number, "{suite}");
        }
    }
}
