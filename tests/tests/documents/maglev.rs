//! docs/maglev.md: sizes of tables, and the test vectors of the specification.

use std::net::{Ipv4Addr, SocketAddr};

use traffic_policy_cluster::model::{
    Protocol,
    maglev::{Member, TableSize, table},
};
use traffic_policy_dataplane::MapSizes;
use traffic_policy_ebpf::{
    abi::{Address, Address4, Address6, Ports, Tuple, maglev},
    hash,
};

use crate::page;

const PAGE: &str = "docs/maglev.md";

fn size(slots: u32) -> TableSize {
    slots.to_string().parse().unwrap()
}

#[test]
fn the_page_has_the_sizes() {
    let room = MapSizes::DEFAULT.maglev;
    let rows: Vec<_> = TableSize::ALL
        .into_iter()
        .map(|slots| {
            let elements = maglev::elements(slots);
            let note = if slots == TableSize::default().slots() { " (default)" } else { "" };
            vec![
                format!("{slots}{note}"),
                format!("{:.1} KiB", f64::from(elements * 8) / 1024.0),
                (room / elements).to_string(),
            ]
        })
        .collect();
    let headings = ["`--maglev-size`", "a table", "tables that the default of `--maglev-entries` holds"];
    page::compare(PAGE, "sizes", &page::table(&headings, &rows));
}

#[test]
fn permutations_are_as_specified() {
    let members = [
        ("10.244.0.1:8080", Protocol::Tcp),
        ("10.244.0.1:8080", Protocol::Udp),
        ("[2001:db8::a:1]:53", Protocol::Udp),
        ("[fd00:10:244::1]:8080", Protocol::Sctp),
    ];
    let rows: Vec<_> = members
        .into_iter()
        .map(|(address, protocol)| {
            let member = Member::new(address.parse().unwrap(), protocol, 1);
            let of = |slots| {
                let permutation = member.permutation(size(slots));
                format!("{}, {}", permutation.offset, permutation.skip)
            };
            vec![format!("`{}`", member.name()), of(251), of(16_381)]
        })
        .collect();
    let headings = ["name", "offset, skip of 251", "offset, skip of 16,381"];
    page::compare(PAGE, "permutations", &page::table(&headings, &rows));
}

/// Weights in words, and by the number of an endpoint.
type Weights = (&'static str, fn(u32) -> u32);

#[test]
fn tables_are_as_specified() {
    let weights: [Weights; 2] = [("1", |_| 1), ("1, 2, 3, 1, 2, 3, …", |number| number % 3 + 1)];
    let mut rows = Vec::new();
    for (count, slots, weights) in
        [(3, 251, weights[0]), (3, 251, weights[1]), (10, 16_381, weights[0]), (100, 16_381, weights[1])]
    {
        let address = |number| SocketAddr::from((Ipv4Addr::from(0x0af4_0001 + number), 8080));
        let members: Vec<_> =
            (0..count).map(|number| Member::new(address(number), Protocol::Tcp, weights.1(number))).collect();
        let table = table(&members, size(slots)).unwrap();
        let first: Vec<_> = table.iter().take(12).map(ToString::to_string).collect();
        let bytes: Vec<_> = table.iter().flat_map(|place| place.to_le_bytes()).collect();
        let hash = siphasher::sip::SipHasher24::new().hash(&bytes);
        rows.push(vec![
            count.to_string(),
            weights.0.to_owned(),
            slots.to_string(),
            first.join(" "),
            format!("`{hash:016x}`"),
        ]);
    }
    let headings = ["endpoints", "weights", "slots", "first slots", "hash of all"];
    page::compare(PAGE, "tables", &page::table(&headings, &rows));
}

#[test]
fn connections_are_as_specified() {
    let mut rows = Vec::new();
    let mut row = |text: &str, hash: u64| {
        let slot = hash::pick(hash, TableSize::default().slots());
        rows.push(vec![text.to_owned(), format!("`{hash:016x}`"), slot.to_string()]);
    };
    let v4 = |source, destination, ports: [u16; 2], protocol| {
        let [source, destination] = [source, destination].map(Address4::from_octets);
        hash_of(source, destination, ports, protocol)
    };
    let v6 = |source: &str, destination: &str, ports: [u16; 2], protocol| {
        let octets = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
        let [source, destination] = [source, destination].map(|text| Address6::from_octets(octets(text)));
        hash_of(source, destination, ports, protocol)
    };
    row("TCP 192.0.2.7:40000 → 203.0.113.1:443", v4([192, 0, 2, 7], [203, 0, 113, 1], [40_000, 443], 6));
    row("TCP 192.0.2.7:40001 → 203.0.113.1:443", v4([192, 0, 2, 7], [203, 0, 113, 1], [40_001, 443], 6));
    row("UDP 192.0.2.7:40000 → 203.0.113.1:443", v4([192, 0, 2, 7], [203, 0, 113, 1], [40_000, 443], 17));
    row("TCP 192.0.2.7:40000 → node port 30080", v4([192, 0, 2, 7], [0; 4], [40_000, 30_080], 6));
    row(
        "TCP [2001:db8::7]:40000 → [2001:db8:1::1]:443",
        v6("2001:db8::7", "2001:db8:1::1", [40_000, 443], 6),
    );
    row("UDP [2001:db8::7]:40000 → node port 30053", v6("2001:db8::7", "::", [40_000, 30_053], 17));
    page::compare(PAGE, "connections", &page::table(&["connection", "hash", "slot"], &rows));
}

fn hash_of<A: Address>(source: A, destination: A, [from, to]: [u16; 2], protocol: u32) -> u64 {
    let tuple = Tuple { source, destination, ports: Ports::from_host(from, to), protocol };
    hash::tuple(&tuple, hash::MAGLEV_SEED)
}
