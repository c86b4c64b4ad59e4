//! Kernel releases of the archive, and the choice among them. Pure.

use std::{collections::BTreeMap, fmt, str::FromStr};

use super::arch::Arch;

/// A series of releases, such as 6.1 or 7.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Series {
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for Series {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (major, minor) = text.split_once('.').ok_or(())?;
        Ok(Self { major: major.parse().map_err(|_| ())?, minor: minor.parse().map_err(|_| ())? })
    }
}

/// The oldest series that the project supports.
pub(super) const OLDEST: Series = Series { major: 6, minor: 1 };

/// One item of `--kernel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    All,
    Oldest,
    Newest,
    Series(Series),
    /// The newest series of a major number: `7.x`.
    NewestOf(u32),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text} is not a kernel: 6.1, 7.x, oldest, newest or all");
        Ok(match text {
            "all" => Self::All,
            "oldest" => Self::Oldest,
            "newest" => Self::Newest,
            _ => match text.strip_suffix(".x") {
                Some(major) => Self::NewestOf(major.parse().map_err(|_| wrong())?),
                None => Self::Series(text.parse().map_err(|()| wrong())?),
            },
        })
    }
}

/// A kernel package of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Release {
    pub(super) series: Series,
    /// The name of the package.
    pub(super) package: String,
    /// The output of `uname -r`.
    pub(super) release: String,
}

/// Returns the newest release of each series that the project supports, from names of packages.
pub(super) fn releases(names: &[String], arch: Arch) -> BTreeMap<Series, Release> {
    let ending = format!("-cloud-{}", arch.debian());
    let mut found: BTreeMap<Series, (Vec<u32>, Release)> = BTreeMap::new();
    for package in names {
        let Some(version) = package.strip_prefix("linux-image-").and_then(|rest| rest.strip_suffix(&ending))
        else {
            continue;
        };
        let numbers: Vec<u32> =
            version.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
        let [major, minor, ..] = numbers[..] else { continue };
        let series = Series { major, minor };
        // A package without a third number only refers to another one.
        if series < OLDEST || version == series.to_string() {
            continue;
        }
        let release = Release { series, package: package.clone(), release: format!("{version}{ending}") };
        match found.get(&series) {
            Some((known, _)) if *known >= numbers => {}
            _ => {
                found.insert(series, (numbers, release));
            }
        }
    }
    found.into_iter().map(|(series, (_, release))| (series, release)).collect()
}

/// Returns the selected releases, the oldest first.
///
/// # Errors
/// A series does not exist; the error lists those that do.
pub(super) fn choose(wanted: &[Wanted], there: &BTreeMap<Series, Release>) -> Result<Vec<Release>, String> {
    let mut chosen: BTreeMap<Series, Release> = BTreeMap::new();
    let missing = |what: &dyn fmt::Display| {
        let known: Vec<_> = there.keys().map(Series::to_string).collect();
        format!("the archive has no kernel {what}; it has {}", known.join(", "))
    };
    for item in wanted {
        let found: Vec<&Release> = match item {
            Wanted::All => there.values().collect(),
            Wanted::Oldest => there.values().take(1).collect(),
            Wanted::Newest => there.values().last().into_iter().collect(),
            Wanted::Series(series) => vec![there.get(series).ok_or_else(|| missing(series))?],
            Wanted::NewestOf(major) => {
                let of_major = there.values().rfind(|release| release.series.major == *major);
                vec![of_major.ok_or_else(|| missing(&format!("{major}.x")))?]
            }
        };
        chosen.extend(found.into_iter().map(|release| (release.series, release.clone())));
    }
    Ok(chosen.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there() -> BTreeMap<Series, Release> {
        let names = [
            "linux-image-5.10.0-1-cloud-amd64",
            "linux-image-6.1.0-47-cloud-amd64",
            "linux-image-6.1.0-50-cloud-amd64",
            "linux-image-6.1.0-50-cloud-amd64-unsigned",
            "linux-image-6.12.94+deb13-cloud-amd64",
            "linux-image-6.12.107+deb13-cloud-amd64",
            "linux-image-7.3-cloud-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
            "linux-image-7.2.9+deb13-cloud-arm64",
            "linux-image-cloud-amd64",
        ];
        releases(&names.map(str::to_owned), Arch::X86_64)
    }

    fn chosen(wanted: &str) -> Result<Vec<String>, String> {
        let wanted: Vec<Wanted> = wanted.split(',').map(|item| item.parse().unwrap()).collect();
        Ok(choose(&wanted, &there())?.into_iter().map(|release| release.release).collect())
    }

    #[test]
    fn the_newest_of_each_series() {
        let (old, middle, new) =
            ("6.1.0-50-cloud-amd64", "6.12.107+deb13-cloud-amd64", "7.3.4+deb13-cloud-amd64");
        assert_eq!(chosen("all").unwrap(), [old, middle, new]);
        assert_eq!(chosen("newest,oldest").unwrap(), [old, new]);
        assert_eq!(chosen("7.x,6.12").unwrap(), [middle, new]);
    }

    #[test]
    fn a_series_that_is_not_there_is_named() {
        let error = chosen("6.6").unwrap_err();
        assert_eq!(error, "the archive has no kernel 6.6; it has 6.1, 6.12, 7.3");
        assert!("six".parse::<Wanted>().is_err() && "8.x".parse::<Wanted>().is_ok());
        assert!(chosen("8.x").unwrap_err().contains("8.x"));
    }
}
