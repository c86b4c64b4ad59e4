//! Slots that move from one member that stays to another when members come or leave, or weights
//! change: the figures of docs/maglev.md, and others' that were computed independently.

use std::collections::BTreeSet;

use super::*;

/// A change of the members of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disruption {
    Leaves,
    Comes,
    /// One leaves, and a new one comes, as a pod is replaced in a rolling update.
    Replaced,
    /// One has twice the weight.
    Doubled,
    /// This share of all leaves at once, in percent.
    Leave(u32),
}

impl Disruption {
    /// Returns the members before and after, and those to or from which slots have to move.
    fn apply(self, run: u32, count: u32) -> ([Vec<Member>; 2], BTreeSet<String>) {
        let first = run * 2000;
        let before = members(first, count);
        let mut after = before.clone();
        let (at, new) = ((run * 7 % count) as usize, members(first + count, 1));
        let name = |member: &Member| member.name().to_owned();
        let concerned: BTreeSet<String> = match self {
            Self::Leaves => [name(&after.remove(at))].into(),
            Self::Comes => {
                after.extend(new.iter().cloned());
                [name(&new[0])].into()
            }
            Self::Replaced => {
                let old = std::mem::replace(&mut after[at], new[0].clone());
                [name(&old), name(&new[0])].into()
            }
            Self::Doubled => {
                after[at].weight = 2;
                [name(&after[at])].into()
            }
            Self::Leave(percent) => {
                after.rotate_left(at);
                let gone = (count * percent / 100) as usize;
                // The order of members does not matter.
                after.drain(..gone).map(|member| name(&member)).collect()
            }
        };
        ([before, after], concerned)
    }

    /// Returns the slots that move between members which it does not concern, in percent of all, in
    /// one run.
    fn moved_in(self, run: u32, slots: u32, count: u32) -> f64 {
        let ([before, after], concerned) = self.apply(run, count);
        let (before, after) = (names(&before, slots), names(&after, slots));
        let is_other = |name: &str| !concerned.contains(name);
        let both = before.iter().zip(&after);
        let moved = both.filter(|(before, after)| before != after && is_other(before) && is_other(after));
        moved.count() as f64 * 100.0 / f64::from(slots)
    }

    /// Returns the mean of some runs.
    fn moved(self, slots: u32, count: u32) -> f64 {
        let runs = runs(slots, count);
        (0..runs).map(|run| self.moved_in(run, slots, count)).sum::<f64>() / f64::from(runs)
    }
}

/// The number of runs: of large tables few vary little, and so take those of few members, whose
/// last slots are searched for longest.
const fn runs(slots: u32, count: u32) -> u32 {
    match slots {
        ..5_000 => 20,
        ..20_000 if count > 5 && count < 200 => 10,
        _ => 4,
    }
}

/// The changes of the page's columns.
const COLUMNS: [Disruption; 7] = [
    Disruption::Leaves,
    Disruption::Comes,
    Disruption::Replaced,
    Disruption::Doubled,
    Disruption::Leave(1),
    Disruption::Leave(5),
    Disruption::Leave(10),
];

/// Slots, members, the largest share above the mean, and the moved slots of the columns of
/// [`COLUMNS`] that have one, all in percent: computed with another 64-bit hash for both numbers of
/// a permutation. NaN: not computed.
const COMPUTED: [[f64; 7]; 13] = [
    [1021.0, 10.0, 0.9, 2.5, f64::NAN, f64::NAN, f64::NAN],
    [1021.0, 100.0, 7.7, 3.5, 3.5, 8.6, 8.8],
    [4093.0, 10.0, 0.2, 1.1, f64::NAN, f64::NAN, f64::NAN],
    [4093.0, 100.0, 0.2, 3.0, 3.0, 4.0, 4.6],
    [16_381.0, 3.0, 0.01, 0.08, f64::NAN, f64::NAN, f64::NAN],
    [16_381.0, 10.0, 0.05, 0.53, f64::NAN, f64::NAN, f64::NAN],
    [16_381.0, 50.0, 0.12, 1.02, f64::NAN, f64::NAN, f64::NAN],
    [16_381.0, 100.0, 0.12, 1.34, 1.3, 1.9, 2.2],
    [16_381.0, 160.0, 0.6, 1.61, 1.8, 2.5, 2.8],
    [16_381.0, 300.0, 0.7, 1.45, 2.6, 3.5, 3.9],
    [16_381.0, 1000.0, 3.8, 0.59, 3.5, 6.6, 7.4],
    [65_521.0, 100.0, 0.1, 0.56, 0.6, 0.9, 1.0],
    [65_521.0, 1000.0, 0.7, 0.57, 2.3, 3.3, 3.6],
];

/// The algorithm gives the same means as another hash does, within what so many runs vary; and
/// docs/maglev.md has what is measured here.
#[test]
fn few_slots_of_others_move() {
    let page = rows_of_page::<10>("| slots | endpoints | largest share above the mean |");
    let mut measured = String::new();
    for [slots, count, published_share, leaves, one, five, ten] in COMPUTED {
        let (slots, count) = (slots as u32, count as u32);
        let most = shares(&members(0, count), slots).into_iter().max().unwrap();
        let share = (f64::from(most) * f64::from(count) / f64::from(slots) - 1.0) * 100.0;
        let moved = COLUMNS.map(|change| match change {
            // Less than a member.
            Disruption::Leave(_) if count < 100 => f64::NAN,
            change => change.moved(slots, count),
        });
        let text = |figure: f64| if figure.is_nan() { "–".to_owned() } else { format!("{figure:.2} %") };
        let cells = moved.map(text).join(" | ");
        measured += &format!("| {slots} | {count} | {share:.2} % | {cells} |\n");

        let about = format!("{slots} slots, {count} members: {moved:.2?}");
        assert!((share - published_share).abs() < 0.06, "{about}: {share}");
        // Fewer slots and members vary more.
        let within = (60.0 / f64::from(slots * count).sqrt()).max(0.16);
        let computed = [leaves, one, five, ten];
        for (moved, computed) in [moved[0], moved[4], moved[5], moved[6]].into_iter().zip(computed) {
            let differs = (moved - computed).abs() > within + computed * 0.03;
            assert!(!differs, "{about}: {moved:.2} %, not {computed}");
        }
        let [leaves, comes, replaced, doubled] = [moved[0], moved[1], moved[2], moved[3]];
        // With few members, the one that comes takes the last slots of some others: up to twice.
        let most = if count > 10 { leaves } else { leaves * 2.0 };
        assert!(comes > leaves - within && comes < most + within, "{about}: as many as when one leaves");
        assert!(replaced < leaves + comes + within, "{about}: two changes at most");
        assert!(doubled < leaves + within, "{about}: no more than by another member");
    }
    println!("{measured}");
    let of_page = page.iter().map(|row| row.map(|figure| if figure.is_nan() { -1.0 } else { figure }));
    let rows = measured
        .lines()
        .map(|line| figures::<10>(line).map(|figure| if figure.is_nan() { -1.0 } else { figure }));
    assert!(of_page.eq(rows), "docs/maglev.md has other figures than these:\n{measured}");
}

/// A Deployment whose pods are replaced one after the other, each once its successor is there:
/// between the first table and the last one, how often the owners of slots change.
#[test]
fn a_rolling_update_moves_slots_again_and_again() {
    let page = rows_of_page::<4>("| slots | pods |");
    let mut measured = String::new();
    for (slots, count) in [(16_381, 10), (16_381, 100), (65_521, 100)] {
        let mut all = members(0, count);
        let mut changes = vec![0_u32; slots as usize];
        let mut former: Vec<String> = names(&all, slots).into_iter().map(str::to_owned).collect();
        let mut note = |all: &[Member]| {
            for ((slot, former), now) in changes.iter_mut().zip(&mut former).zip(names(all, slots)) {
                if former != now {
                    *slot += 1;
                    now.clone_into(former);
                }
            }
        };
        for new in members(count, count) {
            all.push(new);
            note(&all);
            all.remove(0);
            note(&all);
        }
        let sum: u32 = changes.iter().sum();
        let often = changes.iter().filter(|changes| **changes > FORMER).count();
        let [mean, often] = [f64::from(sum), often as f64 * 100.0].map(|figure| figure / f64::from(slots));
        measured += &format!("| {slots} | {count} | {mean:.2} | {often:.1} % |\n");
        assert!(mean >= 1.0, "each slot has a new owner in the end");
    }
    println!("{measured}");
    assert!(
        page.iter().copied().eq(measured.lines().map(figures::<4>)),
        "docs/maglev.md has other figures than these:\n{measured}"
    );
}

/// The number of former owners that are kept of each slot.
const FORMER: u32 = 3;

/// Every size of a table is as even as it can be, with as many members as it is meant for.
#[test]
fn every_size_is_even() {
    for slots in TableSize::ALL {
        let count = (slots / 100).clamp(2, 100);
        let shares = shares(&members(3, count), slots);
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(most - least <= 1 && *least == slots / count, "{slots}: {least} to {most}");
        assert_eq!(shares.iter().sum::<u32>(), slots);
    }
}
