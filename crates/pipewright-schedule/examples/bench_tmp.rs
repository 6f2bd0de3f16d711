use pipewright_schedule::*;
use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let (ranks, m): (u32, u32) = (a[1].parse().unwrap(), a[2].parse().unwrap());
    let t = Instant::now();
    let s = generate("1f1b", &ScheduleSpec { ranks, stages_per_rank: None, microbatches: m }).unwrap();
    println!("generate {:?}", t.elapsed());
    let t = Instant::now();
    let p = lower(&s, &LowerConfig::from(Level::Comms)).unwrap();
    println!("lower {:?}", t.elapsed());
    drop(s);
    let n: usize = p.rows().iter().map(|r| r.len()).sum();
    let t = Instant::now();
    let v = validate(p, Level::Comms).unwrap();
    println!("validate {:?} actions {n}", t.elapsed());
    let t = Instant::now();
    let run = simulate::logical(v.as_program()).unwrap();
    println!("simulate {:?} steps {}", t.elapsed(), run.steps());
    if ranks < 8 {
        std::fs::write("/tmp/pic.svg", picture::svg(&run.timeline(1e-3))).unwrap();
        print!("{}", picture::grid(v.placement().all_ranks().map(|r| run.row(r)), &[]));
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", status.lines().find(|l| l.starts_with("VmHWM")).unwrap());
}
