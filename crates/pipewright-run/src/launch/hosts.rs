//! [`Host`]: a machine that takes processes, and the files that list hosts.

use std::net::{IpAddr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use pipewright::bounded_file::{SMALL_TEXT, read_regular_text};

use pipewright_schedule::words::counted;

use crate::error::RunError;
use crate::training::rank_hosts::host_name;

/// A host, and the number of processes that it takes. Its name becomes an argument of other programs, among them
/// `mpirun` and through it `ssh`, so a name that comes from outside is checked (`Host::read`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The name or address.
    pub name: String,
    /// The most processes.
    pub slots: u32,
}

impl Host {
    /// Reads a host by its name or address.
    ///
    /// # Errors
    /// Returns a sentence about a name that no host has. One that begins with `-` would be an option of the programs
    /// that get it, and one with a comma or a blank would be several hosts.
    pub(super) fn read(name: &str, slots: u32) -> Result<Self, String> {
        if is_host_name(name) || is_address(name) {
            return Ok(Self { name: name.to_owned(), slots });
        }
        Err(format!(
            "`{}` is not the name of a host: a name has letters, digits, `.`, `-` and `_`, and begins with a letter, a digit or `_`",
            name.escape_debug()
        ))
    }
}

impl Host {
    /// Returns whether this is the name of the host. Capital letters are the same as small ones.
    fn is_named(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }
}

fn is_host_name(name: &str) -> bool {
    let is_right = |sign: char| sign.is_ascii_alphanumeric() || "._-".contains(sign);
    name.starts_with(|sign: char| sign.is_ascii_alphanumeric() || sign == '_') && name.chars().all(is_right)
}

/// Returns whether a text is an address of version 6, which may have brackets and the name of an interface.
fn is_address(text: &str) -> bool {
    let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let (address, interface) = text.split_once('%').unwrap_or((text, "_"));
    address.parse::<Ipv6Addr>().is_ok() && is_host_name(interface)
}

/// Returns whether a host is this machine, as far as its name says so.
pub(super) fn is_this_machine(name: &str) -> bool {
    is_name_of(name, &host_name())
}

/// Returns whether a name leads to an address of this machine.
pub(super) fn is_own_address(name: &str) -> bool {
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    // A socket can be bound to addresses of this machine only.
    let mut addresses = (name, 0).to_socket_addrs().into_iter().flatten();
    addresses.any(|address| UdpSocket::bind((address.ip(), 0)).is_ok())
}

/// Returns whether a host's name is the one of the machine `own`, with or without a domain, or the one that
/// every machine has for itself.
fn is_name_of(name: &str, own: &str) -> bool {
    let label = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let is_own = |own: &str| !own.is_empty() && label(name).eq_ignore_ascii_case(&label(own));
    is_loopback || is_own("localhost") || is_own(own)
}

/// The hosts that a command names: in a file, or in a list such as `a,b:2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSource {
    /// The path of a hostfile.
    File(PathBuf),
    /// The hosts.
    List(Vec<Host>),
}

impl HostSource {
    /// Reads a list of names with commas, each with its slots behind a colon if it takes several processes, or the path of
    /// a hostfile. One name without slots is a path.
    ///
    /// # Errors
    /// Returns a sentence about a list with a name that no host has.
    pub fn read(text: &str) -> Result<Self, String> {
        let has_slots = |text: &str| slots_of(text).is_some();
        if !(text.contains(',') || has_slots(text)) || Path::new(text).is_file() {
            return Ok(Self::File(text.into()));
        }
        let mut hosts: Vec<Host> = Vec::new();
        for item in text.split(',') {
            let (name, slots) = slots_of(item).unwrap_or((item, 1));
            if hosts.iter().any(|host| host.is_named(name)) {
                return Err(format!(
                    "the host `{name}` is in the list twice: write it once, as in `{name}:2`"
                ));
            }
            hosts.push(Host::read(name, slots)?);
        }
        Ok(Self::List(hosts))
    }
}

/// Returns the name and the slots of a host in a list, if it has slots. An address of version 6 has brackets then.
fn slots_of(item: &str) -> Option<(&str, u32)> {
    let (name, slots) = item.rsplit_once(':')?;
    let is_plain = !name.contains(':') || name.ends_with(']');
    let slots = slots.parse().ok().filter(|slots| *slots > 0 && is_plain && !name.is_empty())?;
    Some((name, slots))
}

/// Reads a hostfile.
///
/// # Errors
/// Fails if the file cannot be read, or if a line is not a host.
pub(super) fn read_file(path: &Path) -> Result<Vec<Host>, RunError> {
    let text = read_regular_text(path, SMALL_TEXT)
        .map_err(|error| RunError::input(format!("{}: cannot be read: {error}", path.display())))?;
    read(&text).map_err(|mistake| RunError::input(format!("{}:{mistake}", path.display())))
}

/// Reads the text of a hostfile: a host in each line, with `slots=N` if it takes several processes, and comments after
/// `#`.
fn read(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts: Vec<Host> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(name) = words.next() else { continue };
        let mut slots = 1;
        for word in words {
            let count =
                word.strip_prefix("slots=").and_then(|count| count.parse().ok()).filter(|count| *count > 0);
            slots = count
                .ok_or_else(|| format!("{number}: `{word}` is not understood: write `{name} slots=4`"))?;
        }
        if hosts.iter().any(|host| host.is_named(name)) {
            return Err(format!(
                "{number}: the host `{name}` is in the file twice: write it once, with all its slots"
            ));
        }
        hosts.push(Host::read(name, slots).map_err(|mistake| format!("{number}: {mistake}"))?);
    }
    if hosts.is_empty() {
        Err("1: the file has no host: write a line such as `node1 slots=4`".to_owned())
    } else {
        Ok(hosts)
    }
}

/// Returns the hosts for the ranks of a plan, which are some of the slots of the hosts, counted in the order of the
/// file. The hosts of these slots come first, in the order of the ranks of the plan, each with so many slots. The others
/// are spare. Hosts with only as many slots as there are ranks are the hosts of the plan already, unless the plan uses
/// all ranks of its profile.
///
/// # Errors
/// Fails if the hosts do not have these slots, or if ranks of one host are not consecutive.
pub(super) fn of_plan(hosts: Vec<Host>, profile_ranks: &[u32]) -> Result<Vec<Host>, RunError> {
    let takes = hosts.iter().fold(0, |slots: u32, host| slots.saturating_add(host.slots));
    let last = profile_ranks.iter().max().copied().unwrap_or_default();
    let are_of_plan = takes as usize == profile_ranks.len() && last >= takes;
    // Without hosts, all ranks are on this machine.
    if profile_ranks.is_empty() || are_of_plan || takes == 0 {
        return Ok(hosts);
    }
    if last >= takes {
        return Err(RunError::input(format!(
            "the hosts take {}, and the plan uses rank {last} of its profile (pipeline.profile_ranks): name \
             the hosts of all ranks of the profile in their order, or only the hosts of the {} that the plan uses",
            counted(takes, "process"),
            counted(profile_ranks.len(), "rank")
        )));
    }
    let slots = |host: &Host| host.slots as usize;
    let hosts_of_slots: Vec<&Host> =
        hosts.iter().flat_map(|host| std::iter::repeat_n(host, slots(host))).collect();
    let mut planned: Vec<Host> = Vec::new();
    for &rank in profile_ranks {
        let host = hosts_of_slots[rank as usize];
        match planned.iter().position(|known| known.name == host.name) {
            Some(at) if at + 1 == planned.len() => planned[at].slots += 1,
            Some(_) => {
                return Err(RunError::input(format!(
                    "the ranks of the plan (pipeline.profile_ranks) on `{}` are not consecutive, and a launch starts the ranks \
                     of a host one after the other: plan with --data-parallel 1, or start `mpirun` with a rankfile",
                    host.name
                )));
            }
            None => planned.push(Host { slots: 1, ..host.clone() }),
        }
    }
    let is_spare = |host: &Host| planned.iter().all(|known| known.name != host.name);
    let spare: Vec<Host> = hosts.iter().filter(|host| is_spare(host)).cloned().collect();
    Ok([planned, spare].concat())
}

/// Fails if rank 0 of a plan is not on the `first` host, which has the files if the hosts share no folder.
pub(super) fn require_first(first: Option<&Host>, hosts: &[Host]) -> Result<(), RunError> {
    match (first, hosts.first()) {
        (Some(first), Some(host)) if host.name != first.name => Err(RunError::input(format!(
            "the plan has its rank 0 on `{host}` (pipeline.profile_ranks), and the files are on `{first}`, the first host: \
             launch from `{host}` and write it first into --hosts, or let the hosts share a folder (--shared)",
            host = host.name,
            first = first.name
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_plan_are_on_the_hosts_of_its_profile() {
        let check = |text: &str, ranks: &[u32], expected: &str| {
            let found = of_plan(read(text).expect("hosts"), ranks);
            let words = found.map(|hosts| {
                let words = hosts.iter().map(|host| format!("{}:{}", host.name, host.slots));
                words.collect::<Vec<_>>().join(" ")
            });
            match words {
                Ok(words) => assert_eq!(words, expected, "{text:?}"),
                Err(failure) => assert!(failure.text().starts_with(expected), "{}", failure.text()),
            }
        };
        check("a\nb\nc", &[], "a:1 b:1 c:1");
        check("a\nb\nc", &[0, 2], "a:1 c:1 b:1");
        check("a\nb\nc", &[1, 2], "b:1 c:1 a:1");
        check("a slots=2\nb slots=3", &[1, 2, 4], "a:1 b:2");
        check("a\nb\nc", &[2, 0, 1], "c:1 a:1 b:1");
        check("a slots=2\nb slots=2", &[3, 2, 0], "b:2 a:1");
        check(
            "a slots=2\nb",
            &[0, 2, 1],
            "the ranks of the plan (pipeline.profile_ranks) on `a` are not consecutive",
        );
        // Only the hosts of the plan are in the file.
        check("a\nc", &[0, 2], "a:1 c:1");
        check("a", &[0, 2], "the hosts take 1 process, and the plan uses rank 2 of its profile");
        check("a\nb\nc", &[0, 3], "the hosts take 3 processes, and the plan uses rank 3 of its profile");
        assert!(of_plan(Vec::new(), &[0, 2]).is_ok_and(|hosts| hosts.is_empty()), "this machine");
    }

    #[test]
    fn the_first_rank_of_a_plan_is_where_the_files_are() {
        let given = read("a\nb").expect("hosts");
        let hosts = of_plan(given.clone(), &[1, 0]).expect("both hosts");
        assert!(require_first(None, &hosts).is_ok() && require_first(given.last(), &hosts).is_ok());
        let refusal = require_first(given.first(), &hosts);
        let text = refusal.map_err(|error| error.text()).expect_err("another host");
        assert!(text.starts_with(
            "the plan has its rank 0 on `b` (pipeline.profile_ranks), and the files are on `a`"
        ));
    }

    #[test]
    fn a_hostfile_has_hosts_with_slots() {
        let host = |name: &str, slots| Host { name: name.to_owned(), slots };
        assert_eq!(
            read("# all\nnode1 slots=4\n\nnode2 # spare\n"),
            Ok(vec![host("node1", 4), host("node2", 1)])
        );
        let refuse = |text: &str, expected: &str| assert_eq!(read(text).err().as_deref(), Some(expected));
        refuse("a\na slots=2", "2: the host `a` is in the file twice: write it once, with all its slots");
        refuse("node\nNode", "2: the host `Node` is in the file twice: write it once, with all its slots");
        refuse("a slots=0", "1: `slots=0` is not understood: write `a slots=4`");
        refuse("# none\n", "1: the file has no host: write a line such as `node1 slots=4`");
    }

    #[test]
    fn a_name_that_is_no_host_is_refused_before_a_program_gets_it() {
        let right = ["node1", "node1.lab", "10.0.0.1", "fe80::1%eth0", "[::1]", "::1", "_x-1", "n_1"];
        for name in right {
            assert_eq!(Host::read(name, 1).map(|host| host.name), Ok(name.to_owned()));
        }
        let wrong = [
            "-oProxyCommand=touch",
            "--help",
            "-",
            "",
            "a b",
            "a\tb",
            "a,b",
            "a\u{0}",
            "a\n",
            "a;b",
            "$(a)",
            "`a`",
            "a'",
            "a\"",
            "a|b",
            "a/b",
            "\u{a0}",
            "n\u{f6}de",
            "u@a",
            ".",
            "%a",
            "a=b",
            "a\u{200b}",
            "a:4",
            "[a]",
            "::1%",
            "::1%-a",
            "[]",
        ];
        for name in wrong {
            assert!(Host::read(name, 1).is_err(), "{name}");
        }
        let refuse = |text: &str, expected: &str| {
            let mistake = read(text).expect_err("it is not a host");
            assert!(mistake.starts_with(expected), "{mistake}");
        };
        refuse("a\n-oProxyCommand=x slots=2", "2: `-oProxyCommand=x` is not the name of a host: ");
        refuse("a,b", "1: `a,b` is not the name of a host: ");
        refuse("\u{feff}a", "1: `\\u{feff}a` is not the name of a host: ");
    }

    #[test]
    fn a_list_has_names_with_slots_and_one_name_is_a_file() {
        let list = |hosts: &[(&str, u32)]| {
            let host = |(name, slots): &(&str, u32)| Host { name: (*name).to_owned(), slots: *slots };
            Ok(HostSource::List(hosts.iter().map(host).collect()))
        };
        assert_eq!(HostSource::read("a,b:2,10.0.0.3"), list(&[("a", 1), ("b", 2), ("10.0.0.3", 1)]));
        assert_eq!(HostSource::read("a:2"), list(&[("a", 2)]));
        assert_eq!(HostSource::read("[::1]:2,::1"), list(&[("[::1]", 2), ("::1", 1)]));
        assert_eq!(HostSource::read("hosts"), Ok(HostSource::File("hosts".into())));
        let refuse = |text: &str, part: &str| {
            let refused = HostSource::read(text).expect_err("it is not a list");
            assert!(refused.contains(part), "{refused}");
        };
        refuse("a,,b", "`` is not the name of a host");
        refuse("a,-oProxyCommand=x", "`-oProxyCommand=x` is not the name of a host");
        refuse("a,b:0", "`b:0` is not the name of a host");
        refuse("a,a:2", "the host `a` is in the list twice");
        refuse("a,A:2", "the host `A` is in the list twice");
        refuse("a, b", "` b` is not the name of a host");
    }

    #[test]
    fn an_address_of_this_machine_is_its_own() {
        assert!(is_own_address("127.0.0.1"));
        // An address of the documentation, which no machine has.
        assert!(!is_own_address("192.0.2.1"));
    }

    #[test]
    fn this_machine_has_several_names() {
        let is_own = |name| is_name_of(name, "node1.lab");
        let own = ["node1", "node1.lab", "Node1", "NODE1.home", "localhost", "127.0.0.1", "::1"];
        assert!(own.into_iter().all(is_own));
        assert!(!["node2", "node1b.lab", "10.0.0.1"].into_iter().any(is_own));
        assert!(!is_name_of(".lab", ""));
    }
}
