//! The caller keeps a stream for as long as it lends it.
use mlakit::Device;
use mlakit::sim::AtOnce;

fn main() {
    let device = AtOnce::new(1);
    let caller = device.own_stream().unwrap();
    let mut stream = device.stream(&caller).unwrap();
    drop(caller);
    stream.wait().unwrap();
}
