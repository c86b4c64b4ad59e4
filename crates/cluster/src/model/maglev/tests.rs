//! Evenness of tables, compared with published and computed figures; what tables are made of.

mod disruption;

use std::net::Ipv4Addr;

use super::*;

/// The members `10.244.x.y:8080/tcp`, beginning with a number, with weight 1.
fn members(first: u32, count: u32) -> Vec<Member> {
    let base = u32::from(Ipv4Addr::new(10, 244, 0, 0));
    let address = |number| SocketAddr::from((Ipv4Addr::from(base + number), 8080));
    (first..first + count).map(|number| Member::new(address(number), Protocol::Tcp, 1)).collect()
}

fn size(slots: u32) -> TableSize {
    slots.to_string().parse().unwrap()
}

/// The number of slots of each member.
fn shares(members: &[Member], slots: u32) -> Vec<u32> {
    let mut shares = vec![0; members.len()];
    for position in table(members, size(slots)).unwrap() {
        shares[usize::from(position)] += 1;
    }
    shares
}

/// The names by slot.
fn names(members: &[Member], slots: u32) -> Vec<&str> {
    let table = table(members, size(slots)).unwrap();
    table.into_iter().map(|position| members[usize::from(position)].name()).collect()
}

/// The example of the paper, table 1: three members, then without the second. One slot of a
/// remaining member moves.
#[test]
fn the_example_of_the_paper() {
    let turn = |position, [next, skip]: [u32; 2]| Turn { position, next, skip, weight: 1, saved: 0 };
    let [b0, b1, b2] = [[3, 4], [0, 2], [3, 1]];
    let mut all = [turn(0, b0), turn(1, b1), turn(2, b2)];
    assert_eq!(populate(&mut all, 7), [1, 0, 1, 0, 2, 2, 0]);
    assert_eq!(populate(&mut [turn(0, b0), turn(2, b2)], 7), [0, 0, 0, 0, 2, 2, 2]);
}

#[test]
fn sizes_are_primes() {
    for slots in TableSize::ALL {
        assert!((2..slots).take_while(|d| d * d <= slots).all(|d| slots % d != 0), "{slots}");
        assert_eq!(slots.to_string().parse().map(TableSize::slots), Ok(slots));
    }
    assert!("16384".parse::<TableSize>().unwrap_err().contains("251, 509"));
    assert!("".parse::<TableSize>().is_err() && "-251".parse::<TableSize>().is_err());
}

#[test]
fn the_order_of_endpoints_does_not_matter() {
    let sorted = members(0, 50);
    let mut shuffled = sorted.clone();
    shuffled.reverse();
    shuffled.rotate_left(17);
    assert_eq!(names(&sorted, 1021), names(&shuffled, 1021));
    assert_ne!(digest(&sorted, size(1021)), digest(&shuffled, size(1021)), "positions differ");
}

/// The bound of the paper, section 5.3: the members' shares differ by one slot at most.
#[test]
fn equal_weights_have_equal_shares() {
    for (slots, count) in [(251, 1), (251, 251), (509, 10), (16_381, 3), (16_381, 100), (16_381, 1000)] {
        let shares = shares(&members(7, count), slots);
        let fair = slots / count;
        assert!(shares.iter().all(|share| (fair..=fair + 1).contains(share)), "{slots}/{count}: {shares:?}");
    }
}

/// The rows of a table of docs/maglev.md, by the beginning of its first line: each the figures of
/// its cells.
fn rows_of_page<const FIGURES: usize>(begins: &str) -> Vec<[f64; FIGURES]> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/maglev.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = page.lines().skip_while(|line| !line.starts_with(begins)).skip(2);
    table.take_while(|line| line.starts_with('|')).map(figures).collect()
}

/// The figures of a line of a table; NaN where there is a dash.
fn figures<const FIGURES: usize>(line: &str) -> [f64; FIGURES] {
    let figure = |text: &str| {
        let digits: String = text.chars().filter(|char| char.is_ascii_digit() || *char == '.').collect();
        if text == "–" { f64::NAN } else { digits.parse().unwrap() }
    };
    let cells = line.trim_matches('|').split('|').map(str::trim);
    <[f64; FIGURES]>::try_from(cells.map(figure).collect::<Vec<f64>>()).unwrap()
}

/// The times of docs/maglev.md beside those of this run, and the memory of a table as it is in the
/// maps. That alone is compared (`cargo test --release -p traffic-policy-cluster figures --
/// --nocapture`).
#[test]
fn figures_of_the_page() {
    println!("in brackets: docs/maglev.md");
    println!("slots endpoints  equal weights  1, 2, 3  memory");
    let rows = rows_of_page("| slots | endpoints | to compute |");
    assert!(rows.len() >= 7, "{} rows: is this the table of the page?", rows.len());
    for [slots, count, page_took, page_memory] in rows {
        let (slots, count) = (slots as u32, count as u32);
        let equal = milliseconds(&members(0, count), slots);
        let mut unequal = members(0, count);
        unequal.iter_mut().zip((1..=3).cycle()).for_each(|(member, weight)| member.weight = weight);
        let weighted = milliseconds(&unequal, slots);
        // In the maps four slots of two bytes are an element.
        let memory = f64::from(slots.div_ceil(4) * 8) / 1024.0;
        println!(
            "{slots:>5} {count:>9}  {equal:.3} ms ({page_took})  {weighted:.3} ms  {memory:.1} KiB ({page_memory})"
        );
        assert!((memory - page_memory).abs() < 0.06, "{slots} slots: {memory}");
    }
}

/// Returns the median time to compute a table.
fn milliseconds(members: &[Member], slots: u32) -> f64 {
    let mut took: Vec<_> = (0..25)
        .map(|_| {
            let start = std::time::Instant::now();
            std::hint::black_box(table(members, size(slots)));
            start.elapsed()
        })
        .collect();
    took.sort_unstable();
    took[took.len() / 2].as_secs_f64() * 1e3
}

/// Shares follow weights within one slot for each round of the largest weight.
#[test]
fn shares_follow_weights() {
    let mut weighted = members(0, 4);
    for (member, weight) in weighted.iter_mut().zip([1, 2, 5, 0]) {
        member.weight = weight;
    }
    let shares = shares(&weighted, 16_381);
    for (share, weight) in shares.iter().zip([1, 2, 5, 0]) {
        let exact = f64::from(weight) * 16_381.0 / 8.0;
        assert!((f64::from(*share) - exact).abs() <= 1.0, "{shares:?}");
    }
    // Weights count by their relation only.
    let mut tenfold = weighted.clone();
    tenfold.iter_mut().for_each(|member| member.weight *= 10);
    assert_eq!(names(&weighted, 1021), names(&tenfold, 1021));
}

#[test]
fn no_table_without_members_or_for_too_many() {
    assert_eq!(table(&[], size(251)), None);
    assert_eq!(table(&members(0, 252), size(251)), None);
    let mut idle = members(0, 2);
    idle.iter_mut().for_each(|member| member.weight = 0);
    assert_eq!(table(&idle, size(251)), None);
}

#[test]
fn digests_tell_members_weights_and_sizes_apart() {
    let two = members(0, 2);
    let mut heavier = two.clone();
    heavier[1].weight = 2;
    let udp = [Member::new("10.244.0.0:8080".parse().unwrap(), Protocol::Udp, 1), two[1].clone()];
    let mut digests = vec![
        digest(&two, size(251)),
        digest(&two, size(509)),
        digest(&heavier, size(251)),
        digest(&udp, size(251)),
        digest(&two[..1], size(251)),
    ];
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 5);
}
